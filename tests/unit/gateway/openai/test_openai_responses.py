"""Answers as JSON."""

import json

import pytest

from gateway.openai.responses import as_json


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
    ],
)
def test_an_answer_written_in_pieces_is_the_same_json(answer):
    assert as_json(answer) == json.dumps(answer).encode()
