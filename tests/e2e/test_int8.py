"""Int8 weights and an int8 KV pool by their flags: answers stay right. Concurrent requests: test_recomputation.py."""

from typing import Any

import pytest

from quire.client import GenerationOptions
from tests.support.serving import serving

pytestmark = pytest.mark.extended

# Questions that are not in the training data; the embedded model answers them right in bfloat16 and float32.
QUESTIONS = {
    "Question: 82 + 48\nAnswer:": " 82 + 48 = 130.",
    "Question: Say backwards: ship, duck.\nAnswer:": " duck, ship.",
}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"quantization": "int8-weight-only", "dtype": "float32"}, marks=pytest.mark.long),
        {"quantization": "int8-dynamic", "kv_cache_dtype": "int8", "dtype": "bfloat16"},
    ],
    ids=lambda flags: "-".join(flags.values()),
)
async def test_held_out_questions_are_answered_right(flags: dict[str, Any]) -> None:
    async with serving(**flags) as served:
        for question, answer in QUESTIONS.items():
            got = await served.client.generate(question, GenerationOptions(temperature=0.0, max_tokens=30))
            assert got.sequences[0].text.strip() == answer.strip()
