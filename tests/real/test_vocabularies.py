"""Constraints over real vocabularies, with texts in which their added tokens occur."""

import json
import random
import re
from dataclasses import dataclass
from typing import Any, Self

import httpx
import numpy as np
import pytest
import tokenizers

from gateway.offload import FairExecutor
from gateway.text.formats.grammars import CallGrammar, ModelText, constrained_calls
from gateway.text.tokenizer import Tokenizer
from quire.common.v1.common_pb2 import Choice, Constraint
from quire.constraints.check_process import check
from quire.constraints.matcher import Template, Vocabulary
from quire.constraints.tokens import Encode, tokenizer_encode
from quire.model_files.model_directory import ModelDirectory
from quire.service.model_flag import ModelFlag
from quire_cli.supervisor import LocalServer, ServeSettings
from tests.real.models import NAMES, real_model
from tests.support.constraints import mask_of, write

pytestmark = pytest.mark.real
_PLAIN = ("word", " ", "  ", "\n", '{"a": 1}', "é", "e\u0301", "▁", "▁x", "名前", "😀", "<", "<|", "|>", "\u00a0", "ﬁ")
_TEXTS = 4


@dataclass(frozen=True, slots=True)
class _Real:
    """A vocabulary, and how its tokenizer spells a text that follows another one."""

    directory: ModelDirectory
    held: Vocabulary
    encode: Encode

    @classmethod
    def open(cls, name: str) -> Self:
        directory = ModelDirectory.open(real_model(name))
        held = Vocabulary.of_model(directory, directory.config["vocab_size"])
        return cls(directory, held, tokenizer_encode(directory.tokenizer_json()))

    def texts(self, rng: random.Random) -> list[str]:
        """Texts with added tokens of every flag."""
        kinds = [*self.held.special_tokens], [*self.held.text_tokens]
        added = [text for kind in kinds for text in rng.sample(kind, min(6, len(kind)))]
        pieces = [*added, *added, *_PLAIN]
        return ["".join(rng.choices(pieces, k=rng.randint(1, 6))) for _ in range(_TEXTS)]

    def bytes_of(self, token_ids: list[int]) -> bytes:
        return b"".join(self.held.token_bytes[each] for each in token_ids)


@pytest.fixture(scope="module", params=NAMES)
def real(request) -> _Real:
    return _Real.open(request.param)


def test_tokens_have_the_bytes_and_flags_that_the_tokenizer_gives_them(real) -> None:
    library = tokenizers.Tokenizer.from_buffer(real.directory.tokenizer_json())
    served = Tokenizer(library, FairExecutor(1), real.directory.tokenizer_config)
    known = {token_id for token_id in served.special_tokens.values() if token_id < len(real.held.token_bytes)}
    assert known == set(real.held.special_tokens.values())
    # After another token, because decoders drop a space at the beginning of a text.
    (*_, anchor) = library.encode("a", add_special_tokens=False).ids
    before = library.decode([anchor], skip_special_tokens=False)
    texts = library.decode_batch([[anchor, each] for each in range(served.size)], skip_special_tokens=False)
    for text, data in zip(texts, real.held.token_bytes, strict=False):
        assert "\N{REPLACEMENT CHARACTER}" in text or text == before + data.decode()


@pytest.mark.parametrize("kind", ["choice", "choices", "const", "lark"])
def test_texts_with_added_tokens_are_accepted_as_the_tokenizer_spells_them_and_written_to_their_end(real, kind) -> None:
    rng = random.Random(f"{real.directory.name} {kind}")
    special = frozenset(real.held.special_tokens.values())
    for text in real.texts(rng):
        constraint, body = {
            "choice": (Constraint(choice=Choice(texts=[text])), text),
            "choices": (Constraint(choice=Choice(texts=[text, f"{text[:2]}z", "word <think> end"])), text),
            "const": (Constraint(json_schema=json.dumps({"const": text})), json.dumps(text, ensure_ascii=False)),
            "lark": (Constraint(lark=f"start: {json.dumps(text)} /[0-9]{{2}}/ {json.dumps(text)}"), f"{text}12{text}"),
        }[kind]
        assert check(real.held, constraint.SerializeToString()) is None
        template = Template.of(constraint, real.held)
        own = list(real.encode(body))
        # Some tokenizers write some characters as others; such a text has no spelling of theirs.
        if real.bytes_of(own) == body.encode() and special.isdisjoint(own):
            matcher = template.matcher(tuple(real.held.eos))
            for token_id in own:
                matcher.consume(token_id)
            assert (matcher.error, matcher.may_end) == (None, True)
        for choose in (min, max, rng.choice):
            token_ids, has_ended = write(template, lambda ids, choose=choose: int(choose(ids)), max_tokens=600)
            assert has_ended
            assert special.isdisjoint(token_ids)
            written = real.bytes_of(token_ids).decode()
            if kind in ("choice", "const"):
                assert (written if kind == "choice" else json.loads(written)) == text


@pytest.mark.parametrize("tool_format", ["hermes", "deepseek_v31", "glm45", "gemma4", "mistral"])
def test_forced_calls_may_begin_with_the_tokens_of_their_marks_and_end(real, tool_format) -> None:
    tokens = ModelText(None, real.held.special_tokens)
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": ["<b>", "</tool_call>"]}}, "required": ["a"]})
    constraint = constrained_calls(tool_format, [CallGrammar("now", schema)], tokens, is_forced=True, is_single=True)
    assert constraint is not None
    assert check(real.held, constraint.SerializeToString()) is None
    template = Template.of(constraint, real.held)
    # A call may begin after spaces, so that its mark is not forced.
    mark = [real.held.text_tokens.get(each) for each in ("<tool_call>", "</tool_call>")]
    for choose in (min, max):
        token_ids, has_ended = write(
            template, lambda ids, choose=choose: int(mark[0] if mark[0] in ids else choose(ids)), max_tokens=300
        )
        assert has_ended
        if tool_format == "hermes" and mark[0] is not None:
            assert [token_ids[0], token_ids[-1]] == mark


def test_lark_names_the_tokens_of_marks(real) -> None:
    tokens = {**real.held.text_tokens, **real.held.special_tokens}
    mark = next(filter(re.compile(r"<[\w|]+>").fullmatch, tokens), None)
    if mark is not None:
        matcher = Template.of(Constraint(lark=f"start: {mark}"), real.held).matcher(tuple(real.held.eos))
        assert np.flatnonzero(mask_of(matcher, real.held)).tolist() == [tokens[mark]]


async def test_a_server_writes_calls_and_texts_with_added_tokens_of_qwen3(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    schema = {"type": "object", "properties": {"zone": {"enum": ["<b>", "</tool_call>"]}}, "required": ["zone"]}
    tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "the time <think>"}],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "now"}},
        "max_tokens": 60,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    settings = ServeSettings(
        models=(ModelFlag(None, str(real_model("qwen3"))),), grpc_port=0, http_port=0, dtype="float32"
    )
    async with LocalServer(settings) as server:
        await server.wait_ready()
        async with httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=120) as client:
            answer = (await client.post("/v1/chat/completions", json=chat)).json()
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["zone"] in ("<b>", "</tool_call>")
            for text in ("word <think> end", "a<|im_end|>b", "a▁b"):
                body = {"prompt": "x", "structured_outputs": {"choice": [text]}, "max_tokens": 60}
                answer = (await client.post("/v1/completions", json=body)).json()
                assert answer["choices"][0]["text"] == text
    # The worker and the gateway's check share it.
    assert len(list((tmp_path / "quire" / "vocabularies").iterdir())) == 1
