"""Salts of the prefix cache and its reset over HTTP, in front of a real scheduler."""

from tests.support.two_gateways import two_gateways


async def test_cached_prefixes_are_forgotten_except_those_that_are_pinned(tmp_path):
    async with two_gateways(tmp_path) as two:
        http = two.first.http

        async def num_cached(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 1}
            answer = (await http.post("/v1/completions", json=body)).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        prompt = list(range(100, 200))
        await num_cached(prompt)
        assert await num_cached(prompt) == 96
        answer = await two.second.http.post("/reset_prefix_cache")
        assert answer.json() == {"forgotten_blocks": 6}
        assert (await http.post("/reset_prefix_cache")).json() == {"forgotten_blocks": 0}
        assert await num_cached(prompt) == 0
        assert await num_cached(prompt) == 96


async def test_requests_with_different_salts_share_no_prefix(tmp_path):
    async with two_gateways(tmp_path, num_replicas=2) as two:

        async def num_cached(gateway, salt: str | None) -> int:
            body = {"prompt": list(range(100, 200)), "max_tokens": 1, "cache_salt": salt}
            answer = (await gateway.http.post("/v1/completions", json=body)).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        for salt in (None, "a", "b"):
            assert await num_cached(two.first, salt) == 0, salt
            assert await num_cached(two.first, salt) == 96, salt
        body = {"prompt": "Once", "max_tokens": 1, "cache_salt": ""}
        refused = await two.first.http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
