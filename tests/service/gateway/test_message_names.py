"""The names of speakers, which OpenAI's messages may have, as far as the prompt."""

import httpx
import pytest

from quire.arrays import decode_int32
from tests.support.gateway_process import running_gateway
from tests.support.tokenizers import byte_level, write_model_directory

NAMING = "{% for m in messages %}{{ m.name if m.name is defined else m.role }}: {{ m.content }};{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "hello", "name": "Ann"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "张三"},
    {"role": "user", "content": "there", "name": ""},
    {"role": "assistant", "content": "the cat", "name": None},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (NAMING, "Ann: hello;张三: hello;user: there;assistant: the cat;"),
        (PLAIN, "user: hello;user: hello;user: there;assistant: the cat;"),
    ],
    ids=["a template that knows names", "one that does not"],
)
async def test_names_are_part_of_the_prompt_where_the_template_says_so(scheduler, tmp_path, template, expected):
    directory = write_model_directory(tmp_path / "model", byte_level(), chat_template__jinja=template)
    wanted = byte_level().encode(expected, add_special_tokens=False).ids
    async with (
        running_gateway(scheduler, model=str(directory)) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as client,
    ):
        answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        tokenized = await client.post("/tokenize", json={"messages": MESSAGES})
    assert decode_int32(scheduler.submits[0].prompt_token_ids, "prompt").tolist() == wanted
    assert tokenized.json()["tokens"] == wanted
