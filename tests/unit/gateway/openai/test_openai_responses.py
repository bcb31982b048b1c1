"""Answers as JSON, and on their way."""

import asyncio
import json

import pytest

from gateway.openai.responses import WholeResponse, as_json


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
    assert as_json(answer) == json.dumps(answer, separators=(",", ":")).encode()


@pytest.mark.parametrize("size", [1, 65_536, 65_537, 300_000])
async def test_a_large_answer_leaves_piece_by_piece(size):
    body, messages = bytes(range(256)) * (size // 256 + 1), []

    async def make():
        return body[:size]

    async def receive():
        await asyncio.get_running_loop().create_future()

    async def send(message):
        messages.append(message)

    await WholeResponse(make, lambda name: name, {})({}, receive, send)
    start, *pieces = messages
    assert dict(start["headers"])[b"content-length"] == str(size).encode()
    assert b"".join(piece["body"] for piece in pieces) == body[:size]
    assert all(len(piece["body"]) <= 65_536 for piece in pieces)
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
