"""Real tokenizers: ids, texts and streams equal transformers'; a server with one answers, stops and obeys schemas."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gateway.offload import FairExecutor
from gateway.text.tokenizer import Tokenizer
from quire.client import Constraint, FinishReason, GenerationOptions
from quire.model_files.model_directory import ModelDirectory
from tests.real.models import NAMES, real_model
from tests.support.serving import serving

pytestmark = pytest.mark.real

SAMPLE = ("qwen3",)
CASES = [pytest.param(name, marks=[pytest.mark.extended] if name in SAMPLE else []) for name in NAMES]
TEXTS = (
    "",
    " ",
    "Hello world",
    " leading, trailing \n",
    "it's 1234567 o'clock ... isn't it?\tyes\r\n\n\n  no",
    "naïve café e\u0301 ﬁ ½ Ω \u00a0\u200b\u2028",
    "你好世界、こんにちは 안녕하세요 שלום مرحبا नमस्ते",
    "😀👩‍👩‍👧🏽🇨🇭 \U0010ffff \ue000",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}  # ok\n",
    "<s>[INST] a [/INST]</s><|im_start|>user\nb<|im_end|><|eot_id|><bos><think>c</think>",
    '<tool_call>\n{"name": "f", "arguments": {"x": "ä\\n"}}\n</tool_call>',
    "a" * 300 + " " * 40 + "\n" * 20,
)
# Classes of transformers that change what tokenizer.json says (llama2, gpt4o), and code in the package (internlm2).
OTHERWISE = ("gpt4o", "internlm2", "llama2")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["größer", "小", "<b>"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
CHOICES = ["grün", "rouge ", "红色"]


@pytest.fixture
def executor() -> Iterator[FairExecutor]:
    pool = FairExecutor(1)
    yield pool
    pool.shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
async def test_ids_texts_and_streams_equal_those_of_transformers(name: str, executor: FairExecutor) -> None:
    directory = ModelDirectory.open(real_model(name))
    ours, theirs = Tokenizer.open(directory, executor), _theirs(name, directory)
    for text in TEXTS:
        for special in (True, False):
            token_ids = await ours.encode(text, add_special_tokens=special)
            assert token_ids == theirs.encode(text, add_special_tokens=special), (text, special)
        for kept in (True, False):
            expected = theirs.decode(token_ids, skip_special_tokens=not kept, clean_up_tokenization_spaces=False)
            assert ours.decode(token_ids, include_special_tokens=kept) == expected, (text, kept)
            pieces = ours.detokenizer(include_special_tokens=kept)
            assert "".join([*map(pieces.push, token_ids), pieces.flush()]) == expected, (text, kept)
    assert ours.size == max(theirs.get_vocab().values()) + 1


def _theirs(name: str, directory: ModelDirectory) -> Any:
    tokenizer_class: Any = PreTrainedTokenizerFast if name in OTHERWISE else AutoTokenizer
    return tokenizer_class.from_pretrained(directory.path)


@pytest.mark.parametrize("name", CASES)
async def test_a_server_writes_what_the_tokenizer_reads_and_ends_as_it_is_told(name: str) -> None:
    directory = ModelDirectory.open(real_model(name))
    library = LibraryTokenizer.from_buffer(directory.tokenizer_json())
    async with serving(model=str(directory.path), num_gpu_blocks=64, dtype="float32", max_model_len=512) as served:
        client = served.client
        free = GenerationOptions(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True, include_special_tokens=True)
        prompt = "The größer 小 number is"
        (whole,) = (await client.generate(prompt, free)).sequences
        before = (await client.tokenize(prompt)).token_ids
        assert list(before) == library.encode(prompt).ids
        assert len(whole.token_ids) == 24
        stream = client.generate_stream(prompt, free)
        async with stream:
            assert "".join([piece async for piece in stream.text]) == whole.text

        stop = whole.text[len(whole.text) // 2 :][:3]
        (stopped,) = (await client.generate(prompt, replace(free, stop=[stop]))).sequences
        assert (stopped.finish_reason, stopped.stop_string) == (FinishReason.STOP, stop)
        assert stopped.text == whole.text[: whole.text.index(stop)]

        for end in directory.eos_token_ids:
            biased = replace(free, ignore_eos=False, include_special_tokens=False, logit_bias={end: 100.0})
            (ended,) = (await client.generate(prompt, biased)).sequences
            assert (ended.finish_reason, ended.stop_token_id, ended.text) == (FinishReason.STOP, end, "")

        sampled = GenerationOptions(temperature=1.0, seed=3, max_tokens=200)
        (chosen,) = (await client.generate(prompt, replace(sampled, constraint=Constraint(choice=CHOICES)))).sequences
        assert chosen.text in CHOICES
        (valid,) = (
            await client.generate(prompt, replace(sampled, constraint=Constraint(json_schema=SCHEMA)))
        ).sequences
        jsonschema.validate(json.loads(valid.text), SCHEMA)
