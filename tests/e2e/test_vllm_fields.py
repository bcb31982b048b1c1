"""vLLM's fields that change what a worker samples or reports, by OpenAI's client."""

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.support.serving import serving

MESSAGES: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}]


async def test_the_reasoning_ends_at_its_budget_and_named_tokens_are_reported():
    async with (
        serving(num_gpu_blocks=64, dtype="float32", reasoning_parser="qwen3", speculate=("auto",)) as served,
        AsyncOpenAI(base_url=f"http://{served.server.http_address}/v1", api_key="-", max_retries=0) as client,
    ):
        end = list((await served.client.tokenize("</think>", add_special_tokens=False)).token_ids)

        async def complete(prompt: str = "<|assistant|><think>", logprobs: int | None = None, **fields: Any) -> Any:
            body = {"return_token_ids": True, "ignore_eos": True} | fields
            made = await client.completions.create(
                model="quire-tiny", prompt=prompt, max_tokens=20, seed=7, logprobs=logprobs, extra_body=body
            )
            return made.choices[0]

        free = (await complete()).token_ids
        assert (await complete(thinking_token_budget=-1)).token_ids == free
        for budget in (0, 6, 20):
            ids = (await complete(thinking_token_budget=budget)).token_ids
            assert ids[: budget + len(end)] == (free[:budget] + end)[:20]
        # Nothing is limited before the reasoning begins.
        assert (await complete("Once", thinking_token_budget=0)).token_ids == (await complete("Once")).token_ids

        continued = {"add_generation_prompt": False, "continue_final_message": True, "ignore_eos": True}
        chat = await client.chat.completions.create(
            model="quire-tiny", messages=MESSAGES, max_tokens=20, extra_body={"thinking_token_budget": 3} | continued
        )
        assert chat.choices[0].message.model_extra["reasoning"]
        assert chat.usage.completion_tokens_details.reasoning_tokens == 3 + len(end)

        top = (await complete(logprobs=20)).logprobs.top_logprobs
        ids = [(await served.client.tokenize(text, add_special_tokens=False)).token_ids[0] for text in list(top[0])[:3]]
        named = (await complete(logprobs=0, logprob_token_ids=ids[::-1])).logprobs
        assert list(named.top_logprobs[0])[:3] == list(top[0])[2::-1]
        assert {text: top[0][text] for text in named.top_logprobs[0]} == named.top_logprobs[0]

        cases: list[tuple[dict[str, Any], str]] = [
            ({"thinking_token_budget": -2}, "thinking_token_budget"),
            ({"thinking_token_budget": 1, "allowed_token_ids": [5]}, "allowed_token_ids"),
            ({"thinking_token_budget": 1, "bad_words": ["</think>", "</"]}, "bad_words"),
            ({"logprob_token_ids": [1]}, "logprob_token_ids"),
            ({"logprobs": 1, "logprob_token_ids": [10**6]}, "logprob_token_ids[0]"),
            ({"logprobs": 1, "logprob_token_ids": list(range(21))}, "logprob_token_ids"),
            ({"logprobs": 1, "logprob_token_ids": [1], "use_beam_search": True, "seed": None}, "logprob_token_ids"),
            ({"logprobs": 1, "logprob_token_ids": [1], "echo": True, "max_tokens": 0}, "logprob_token_ids"),
        ]
        for fields, param in cases:
            with pytest.raises(BadRequestError) as refused:
                await complete(**fields)
            assert refused.value.param == param, fields
