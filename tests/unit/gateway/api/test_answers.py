"""Answers as JSON, and on their way."""

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.api.answers import OPENAI, LazyList, WholeResponse, as_json, json_pieces
from gateway.api.respond import Call, respond
from gateway.request.answer_memory import AnswerMemory
from gateway.request.generator import Generator


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {
            "id": 'a"b',
            "choices": [{"text": "é", "logprobs": None}, {"text": "\x00", "n": [1, [2.5]]}],
            "usage": {"a": 1},
        },
        {"choices": [{"long": [{"é": [None] * 3, "n": number} for number in range(200)]}, {"long": list(range(65))}]},
        {"long": [[number] * 70 for number in range(64)], "empty": {}},
    ],
)
def test_an_answer_written_in_pieces_is_the_same_json(answer):
    assert b"".join(json_pieces(answer)) == json.dumps(answer, separators=(",", ":")).encode()
    assert json.loads(as_json(answer)) == answer


@pytest.mark.parametrize("text", ["\N{LINE SEPARATOR}", "\N{PARAGRAPH SEPARATOR}", "\x85\v\f\x1c", "\ud800"])
@pytest.mark.parametrize("number", [1, 1 << 70])
def test_an_event_is_one_line_of_unicode_for_every_reader(text, number):
    event = OPENAI.event({"content": f"你{text}", "number": number})
    assert len(event.decode().splitlines()) == 2
    assert json.loads(event.removeprefix(b"data: ")) == {"content": f"你{text}", "number": number}


def test_the_entries_of_lazy_lists_are_made_as_they_are_written():
    made = []

    def entries(count):
        for number in range(count):
            made.append(number)
            yield {"number": number, "squares": LazyList(lambda number=number: [number, number * number])}

    answer = {"empty": LazyList(list), "choices": [{"long": LazyList(lambda: entries(5000))}], "end": 1}
    pieces = json_pieces(answer)
    first = next(pieces)
    assert 32_768 <= len(first) < 40_000
    assert 0 < len(made) < 2500
    whole = [{"number": number, "squares": [number, number * number]} for number in range(5000)]
    expected = {"empty": [], "choices": [{"long": whole}], "end": 1}
    assert first + b"".join(pieces) == json.dumps(expected, separators=(",", ":")).encode()
    assert as_json(LazyList(lambda: [1, "é"])) == b'[1,"\\u00e9"]'


async def sent(make):
    """The messages of the response whose body `make` makes; the first message starts the response."""
    return await messages_of(WholeResponse(make, {}))


async def messages_of(response):
    messages = []

    async def receive():
        await asyncio.get_running_loop().create_future()

    async def send(message):
        messages.append(message)

    await response({}, receive, send)
    return messages


@pytest.mark.parametrize("size", [1, 65_536, 65_537, 300_000])
async def test_a_large_answer_leaves_piece_by_piece_and_a_small_one_with_its_length(size):
    body = bytes(range(256)) * (size // 256 + 1)

    async def make():
        for begin in range(0, size, 100_000):
            yield body[begin : min(begin + 100_000, size)]

    start, *pieces = await sent(make)
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers.get(b"content-length") == (str(size).encode() if size <= 65_536 else None)
    assert b"".join(piece["body"] for piece in pieces) == body[:size]
    assert all(len(piece["body"]) <= 65_536 for piece in pieces)
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]


@pytest.mark.parametrize(("ended_at", "status"), [(0, 400), (150, 200)])
async def test_an_answer_that_is_ended_for_its_memory_while_it_is_written_says_so_unless_it_has_begun(
    monkeypatch, ended_at, status
):
    memory = AnswerMemory(per_call=1000, per_key=1000, total=1000)

    def entries():
        for number in range(300):
            if number == ended_at:
                (call,) = memory._keys["key"].calls
                call.add(1001)
            yield {"text": "x" * 1000, "long": [0] * 65}

    async def nothing(*_):
        return []

    async def shaper(*_):
        return SimpleNamespace(whole=lambda _: {"choices": LazyList(entries)})

    monkeypatch.setattr("gateway.api.respond.running", lambda *_, **__: contextlib.nullcontext([]))
    generator = SimpleNamespace(call_memory=lambda form: memory.call("key", form))
    call: Any = SimpleNamespace(
        results=nothing,
        id="x",
        streams=False,
        dialect=OPENAI,
        shows_prompt_by_choice=False,
        requests=nothing,
        shaper=shaper,
        keep=lambda: asyncio.sleep(0),
        names=lambda _: str,
    )
    response = respond(cast(Generator, generator), cast(Call, call), 15.0)
    start, *pieces = await messages_of(response)
    assert start["status"] == status
    assert pieces[-1].get("more_body", False) == (status == 200)
    if status == 400:
        assert b"--max-answer-bytes" in pieces[0]["body"]


class CountedDict(dict[str, Any]):
    """Counts how often its values are looked at."""

    num_looks = 0

    def values(self) -> Any:
        self.num_looks += 1
        return super().values()


@pytest.mark.parametrize("bottom", [list(range(65)), [[list(range(65))]], 1])
def test_deep_objects_are_looked_at_once(bottom):
    """Looking at the whole object again at each level took seconds for one request."""
    dicts: list[CountedDict] = []
    value: Any = bottom
    for level in range(50):
        dicts.append(CountedDict(before=1, below=value, behind={"level": level}))
        value = [dicts[-1]]
    assert json.loads(b"".join(json_pieces({"value": value}))) == {"value": value}
    assert max(each.num_looks for each in dicts) == 1
