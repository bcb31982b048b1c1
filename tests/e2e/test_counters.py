"""Counters of a gateway equal the sums of the usages of its answers, with dropped candidates included."""

from typing import Any

import httpx

from tests.support.metrics import read_metrics
from tests.support.serving import Served

CALLS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "two sequences": {"n": 2},
    "the best of three": {"best_of": 3},
    "a beam search": {"use_beam_search": True, "n": 2, "best_of": 3, "temperature": 0},
    "ended by a stop string": {"stop": ["a"], "temperature": 0},
}


async def test_counters_are_the_sums_of_usages_with_candidates_that_were_dropped(served: Served) -> None:
    port = int(served.server.http_address.rpartition(":")[2])
    before = await read_metrics(port)
    usages: list[dict[str, int]] = []
    num_sequences = 0
    async with httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=60) as http:
        for name, more in CALLS.items():
            body = {"prompt": "Once upon a time", "max_tokens": 6, "ignore_eos": True} | more
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, (name, answer.text)
            usages.append(answer.json()["usage"])
            num_sequences += len(answer.json()["choices"])
    after = await read_metrics(port)

    def counted(name: str) -> float:
        return sum(after[key] - before.get(key, 0) for key in after if key.partition("{")[0] == f"quire_gateway_{name}")

    assert counted("requests_total") == len(CALLS)
    assert counted("finished_sequences_total") == num_sequences
    assert counted("prompt_tokens_total") == sum(each["prompt_tokens"] for each in usages)
    assert counted("generated_tokens_total") == sum(each["completion_tokens"] for each in usages)
    by_call = dict(zip(CALLS, usages, strict=True))
    assert by_call["the best of three"]["completion_tokens"] == 18
    assert by_call["a beam search"]["completion_tokens"] > 12
