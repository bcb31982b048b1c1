"""`quire batch`: a file of requests, a server only for that file, and the answers in their order."""

import json
from asyncio import create_subprocess_exec, subprocess
from pathlib import Path
from typing import Any

import pytest

from quire_cli.main import main
from tests.support.serving import forked_quire


async def run(*flags: str) -> tuple[int | None, str, str]:
    pipe = subprocess.PIPE
    process = await create_subprocess_exec(*forked_quire(), "batch", *flags, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def request_of(custom_id: str, **body: Any) -> str:
    body = {"messages": [{"role": "user", "content": "Hello!"}]} | body
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(fields) + "\n"


async def test_a_file_is_answered_in_its_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(
        "".join(request_of(each, max_tokens=-1 if each == "bad" else 8) for each in ("one", "bad", "two"))
    )
    flags = ["--num-threads=1", "--num-gpu-blocks=256", "--log-level=warning"]
    status, out, err = await run(str(requests), f"--output={answers}", *flags)
    assert (status, out) == (1, ""), err
    assert "2 of 3 requests answered, 1 failed" in err
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [(each["custom_id"], each["response"]["status_code"]) for each in found] == [
        ("one", 200),
        ("bad", 400),
        ("two", 200),
    ]
    assert (
        found[0]["response"]["body"]["choices"][0]["message"] == found[2]["response"]["body"]["choices"][0]["message"]
    )
    # A run that was interrupted within its second line continues after the first one.
    whole = answers.read_bytes().splitlines(keepends=True)
    answers.write_bytes(whole[0] + whole[1][:30])
    status, _, err = await run(str(requests), f"--output={answers}", *flags)
    assert (status, "2 of 3 requests answered, 1 failed" in err) == (1, True), err
    resumed = answers.read_bytes().splitlines(keepends=True)
    assert (resumed[0], len(resumed)) == (whole[0], 3)
    assert [json.loads(line)["custom_id"] for line in resumed] == ["one", "bad", "two"]
    # A command that starts no server needs no process of its own.
    assert main(["batch", str(requests), f"--output={answers}", *flags]) == 1
    assert "has all 3 answers already" in capsys.readouterr().err
    assert answers.read_bytes() == b"".join(resumed)
    answers.write_bytes(b"".join(resumed[1:]))
    assert main(["batch", str(requests), f"--output={answers}", *flags]) == 2
    assert "is the answer to 'bad', where" in capsys.readouterr().err


def test_a_file_that_is_no_batch_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "in.jsonl"
    for text, message in [
        ("", "its first line has no url"),
        (request_of("a") * 2, "custom_id is 'a', as in line 1"),
        (request_of("a").replace("chat/completions", "embeddings"), "it must be for one of"),
    ]:
        requests.write_text(text)
        assert main(["batch", str(requests)]) == 2
        assert message in capsys.readouterr().err
    assert main(["batch", str(tmp_path / "none")]) == 2
