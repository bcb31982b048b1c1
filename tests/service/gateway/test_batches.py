"""Files and batches, with OpenAI's own client."""

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.rpc import code_pb2
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError

from quire.scheduler.v1 import scheduler_pb2
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.keys import KeysFile
from tests.support.rig import Rig, running_rig
from tests.support.scheduler_process import until

ENDS = ("completed", "failed", "expired", "cancelled")
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETION: {"prompt": "Once", "max_tokens": 20},
    RESPONSE: {"input": "hello"},
}


@pytest.fixture
async def rig(tmp_path, model) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, model=model, batch_dir=tmp_path / "batches") as running:
        running.reset()
        yield running


def client_of(gateway: RunningGateway, api_key: str = "unused") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key=api_key, max_retries=0)


@pytest.fixture
async def client(rig) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(rig.gateway) as made:
        yield made


def line(custom_id: Any, url: str = CHAT, body: Any = None, **fields: Any) -> bytes:
    fields = {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": BODIES[url] if body is None else body,
    } | fields
    return json.dumps(fields).encode() + b"\n"


async def begin(client: AsyncOpenAI, content: bytes, url: Any = CHAT, name: str = "in.jsonl") -> Any:
    file = await client.files.create(file=(name, content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


async def until_ended(client: AsyncOpenAI, batch_id: str) -> Any:
    async def has_ended() -> bool:
        return (await client.batches.retrieve(batch_id)).status in ENDS

    await until(has_ended)
    return await client.batches.retrieve(batch_id)


async def results_of(client: AsyncOpenAI, file_id: str) -> list[Any]:
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


@pytest.mark.parametrize("url", BODIES)
async def test_a_batch_answers_as_its_endpoint_does(client, rig, url):
    bad = {"max_output_tokens" if url == RESPONSE else "max_tokens": -1}
    content = line("a", url) + b"\n" + line("b\u2028", url) + line("bad", url, BODIES[url] | bad)
    batch = await begin(client, content, url)
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", url)
    batch = await until_ended(client, batch.id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 2, 1)
    good = await results_of(client, batch.output_file_id)
    assert [each["custom_id"] for each in good] == ["a", "b\u2028"]
    plain = (await rig.http.post(url, json=BODIES[url])).json()
    for each in good:
        assert (each["response"]["status_code"], each["error"]) == (200, None)
        answer = each["response"]["body"]
        assert answer["usage"] == plain["usage"]
        assert json.dumps(answer.get("choices")) == json.dumps(plain.get("choices"))
    (wrong,) = await results_of(client, batch.error_file_id)
    assert wrong["custom_id"] == "bad"
    assert wrong["response"]["status_code"] == 400
    assert next(iter(bad)) in wrong["response"]["body"]["error"]["message"]
    assert {submit.priority for submit in rig.scheduler.submits[:2]} == {-100}


async def test_files_are_stored_listed_and_deleted(client, rig, tmp_path):
    content = line("a") * 3
    names = ["../../../etc/passwd", "/abs/path", "a\x00b\r\nc", "x" * 1000]
    made = [await client.files.create(file=(name, content), purpose="batch") for name in names[:2]]
    listed = await client.files.list()
    assert [file.id for file in listed.data] == [file.id for file in reversed(made)]
    assert {file.filename for file in made} <= {"../../../etc/passwd", "/abs/path", "passwd", "path"}
    assert all((file.bytes, file.purpose) == (len(content), "batch") for file in made)
    assert (await client.files.content(made[0].id)).content == content
    assert sorted(each.name for each in (tmp_path / "batches" / "files").iterdir()) == sorted(each.id for each in made)
    page = await client.files.list(limit=1, after=made[1].id)
    assert [file.id for file in page.data] == [made[0].id]
    assert (await client.files.delete(made[0].id)).deleted
    with pytest.raises(NotFoundError):
        await client.files.retrieve(made[0].id)
    for hostile in ("..", "file-..%2f..%2fbatches.db", "batches.db", "file-" + "0" * 32):
        answer = await rig.http.get(f"/v1/files/{hostile}/content")
        assert answer.status_code == 404, hostile


MORE = pytest.mark.extended


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        pytest.param(b"\n \n", "empty_file", None, marks=MORE),
        pytest.param(line("a") + line("a"), "duplicate_custom_id", 2, marks=MORE),
        (line("a") + b"{not json}\n", "invalid_json_line", 2),
        pytest.param(b"[" * 100_000 + b"\n", "invalid_json_line", 1, marks=MORE),
        pytest.param(b'{"custom_id": "\xff"}\n', "invalid_json_line", 1, marks=MORE),
        pytest.param(b'{"custom_id": NaN}\n', "invalid_json_line", 1, marks=MORE),
        pytest.param(b"[]\n", "invalid_json_line", 1, marks=MORE),
        (line(5), "invalid_custom_id", 1),
        pytest.param(line(""), "invalid_custom_id", 1, marks=MORE),
        pytest.param(line("x" * 513), "invalid_custom_id", 1, marks=MORE),
        (line("a", method="GET"), "invalid_method", 1),
        (line("a", COMPLETION), "invalid_url", 1),
        pytest.param(line("a", body=[]), "invalid_body", 1, marks=MORE),
        (line("a", body=BODIES[CHAT] | {"stream": True}), "streaming_unsupported", 1),
        pytest.param(line("a", body=BODIES[CHAT] | {"durable": True}), "invalid_body", 1, marks=MORE),
        (line("a") + line("b", body=BODIES[CHAT] | {"model": "other"}), "model_not_found", 2),
        (line(None), "missing_required_parameter", 1),
        pytest.param(line("a", method=None), "missing_required_parameter", 1, marks=MORE),
        pytest.param(line("a").replace(b'"url"', b'"x"'), "missing_required_parameter", 1, marks=MORE),
        pytest.param(line("a").replace(b'"body"', b'"x"'), "missing_required_parameter", 1, marks=MORE),
        (line("a") + b"x" * (5 << 20), "line_too_long", 2),
        (line("a", body={"prompt": [[]] * 150_000}), "too_many_values", 1),
    ],
)
async def test_a_hostile_input_fails_with_its_line(client, content, code, number):
    batch = await until_ended(client, (await begin(client, content)).id)
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]
    assert batch.output_file_id is batch.error_file_id is None


async def test_what_a_batch_cannot_be_is_refused_at_once(client, rig):
    file = await client.files.create(file=("a", line("a")), purpose="batch")
    for wrong, param in [({"endpoint": "/v1/rerank"}, "endpoint"), ({"endpoint": "/v1/x"}, "endpoint")]:
        with pytest.raises(BadRequestError) as refused:
            await client.batches.create(input_file_id=file.id, completion_window="24h", **wrong)
        assert refused.value.param == param
    with pytest.raises(NotFoundError):
        await client.batches.create(input_file_id="file-1", endpoint=CHAT, completion_window="24h")
    with pytest.raises(BadRequestError) as refused:
        await client.files.create(file=("a", b"x"), purpose="fine-tune")
    assert refused.value.param == "purpose"
    for kind, content in [("application/json", b"{}"), ("multipart/form-data", b"x"), ("text/plain", b"x")]:
        answer = await rig.http.post("/v1/files", content=content, headers={"content-type": kind})
        assert answer.status_code in (400, 415), kind
    garbage = {"content-type": "multipart/form-data; boundary=x"}
    for content in (b"--x\r\n", b"--x--\r\n", b"--x\r\nnonsense: 1\r\n\r\nabc\r\n--x--\r\n", b"\x00" * 100):
        assert (await rig.http.post("/v1/files", content=content, headers=garbage)).status_code == 400


async def test_limits_are_named(tmp_path, model):
    limits = {"max_batch_requests": 2, "max_batch_file_bytes": 2048, "max_batch_dir_bytes": 4000}
    async with (
        running_rig(tmp_path, model=model, batch_dir=tmp_path / "b", **limits) as rig,
        client_of(rig.gateway) as client,
    ):
        batch = await until_ended(client, (await begin(client, line("a") + line("b") + line("c"))).id)
        assert [error.code for error in batch.errors.data] == ["too_many_requests"]
        assert "--max-batch-requests" in batch.errors.data[0].message
        for size in (2049, 3 << 20):
            with pytest.raises(APIStatusError) as refused:
                await client.files.create(file=("a", b"x" * size), purpose="batch")
            assert (refused.value.status_code, "--max-batch-file-bytes" in refused.value.message) == (413, True)
        await client.files.create(file=("a", b"x" * 2048), purpose="batch")
        with pytest.raises(APIStatusError) as refused:
            await client.files.create(file=("a", b"x" * 2048), purpose="batch")
        assert (refused.value.status_code, "--max-batch-dir-bytes" in refused.value.message) == (429, True)
    assert len(list((tmp_path / "b" / "files").iterdir())) == 2


async def test_requests_of_batches_run_as_far_as_there_is_memory_for_their_bodies(scheduler, tmp_path):
    limits: dict[str, Any] = {"max_message_bytes": 10_000, "max_total_body_bytes": 10_000}
    content = b"".join(line(name, COMPLETION, BODIES[COMPLETION] | {"user": "x" * 2000}) for name in "abc")
    most = 0
    async with (
        running_gateway(scheduler, batch_dir=tmp_path / "batches", **limits) as gateway,
        client_of(gateway) as client,
    ):
        scheduler.emits.clear()
        batch = await begin(client, content, COMPLETION)
        await scheduler.until(lambda: scheduler.live)

        async def has_ended() -> bool:
            nonlocal most
            most = max(most, len(scheduler.live))
            scheduler.emits.set()
            return (await client.batches.retrieve(batch.id)).status in ENDS

        await until(has_ended)
        counts = (await client.batches.retrieve(batch.id)).request_counts
    # One request's body takes almost all memory for batches, which is a quarter of the memory for all bodies.
    assert (most, counts.completed) == (1, 3)


async def test_a_batch_is_cancelled_with_what_was_answered(client, rig):
    rig.scheduler.emits.clear()
    batch = await begin(client, line("a") + line("b"))

    async def runs() -> bool:
        return len(rig.scheduler.live) == 2

    await until(runs)
    with pytest.raises(APIStatusError) as refused:
        await client.batches.cancel((await until_ended(client, (await begin(client, b"")).id)).id)
    assert (refused.value.status_code, refused.value.code) == (409, "batch_done")
    assert refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(BadRequestError) as refused:
        await client.files.delete(batch.input_file_id)
    assert refused.value.code == "file_in_use"
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await until_ended(client, batch.id)
    assert (batch.status, batch.request_counts.total, batch.request_counts.completed) == ("cancelled", 2, 0)
    assert batch.cancelled_at is not None
    assert (await client.batches.cancel(batch.id)).status == "cancelled"
    assert not rig.gateway.gateway._models.default.ledger


async def test_a_request_that_waits_for_its_next_try_keeps_no_place(tmp_path, model):
    full = scheduler_pb2.RequestFailure(
        code=code_pb2.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", message="full", retry_after_ms=600_000
    )
    async with running_rig(tmp_path, model=model, batch_dir=tmp_path / "batches", batch_concurrency=1) as rig:
        rig.reset()
        async with client_of(rig.gateway) as client:
            rig.scheduler.refusal.append(full)
            waits = await begin(client, line("a"))

            async def is_refused() -> bool:
                return not rig.scheduler.refusal

            await until(is_refused)
            assert (await until_ended(client, (await begin(client, line("b"))).id)).status == "completed"
            await client.batches.cancel(waits.id)
            assert (await until_ended(client, waits.id)).status == "cancelled"


async def test_content_that_somebody_took_away_is_an_error_of_its_own(client, tmp_path, caplog):
    file = await client.files.create(file=("in.jsonl", line("a")), purpose="batch")
    url = f"{client.base_url}files/{file.id}/content"
    for asked, status in (("bytes=0-3", 206), ("bytes=5-3", 200), ("items=1", 200), ("bytes=0-1,3-4", 200)):
        answer = await client._client.get(url, headers={"range": asked})
        assert (answer.status_code, answer.content) == (status, line("a")[:4] if status == 206 else line("a"))
    (tmp_path / "batches" / "files" / file.id).unlink()
    with pytest.raises(NotFoundError, match="is gone"):
        await client.files.content(file.id)
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    ended = await until_ended(client, batch.id)
    assert (ended.status, ended.errors.data[0].code) == ("failed", "file_not_found")
    assert not [each for each in caplog.records if each.exc_info]


async def test_leases_are_renewed_while_a_file_is_kept(client, tmp_path, monkeypatch):
    is_renewed, real = threading.Event(), os.fsync

    def slow(file: int) -> None:
        assert is_renewed.wait(30)
        real(file)

    monkeypatch.setattr(os, "fsync", slow)
    uploading = asyncio.create_task(client.files.create(file=("in.jsonl", line("a")), purpose="batch"))

    async def is_copied() -> bool:
        return any(each.stat().st_size for each in (tmp_path / "batches" / "files").iterdir())

    await until(is_copied)
    assert (await client.files.list()).data == []
    is_renewed.set()
    assert (await uploading).bytes == len(line("a"))


async def test_a_full_disk_of_temporary_files_is_no_fault_of_the_gateway(client, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(APIStatusError, match="cannot be stored") as refused:
        await client.files.create(file=("in.jsonl", line("a") * 30_000), purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (503, "unavailable")
    assert not [each for each in caplog.records if each.exc_info]


async def test_files_and_batches_are_private_to_a_tenant(scheduler, tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    acme, other = keys.add("acme"), keys.add("other")
    async with (
        running_gateway(scheduler, keys_files=(keys.path,), batch_dir=tmp_path / "b") as gateway,
        client_of(gateway, acme) as mine,
        client_of(gateway, other) as theirs,
    ):
        body = {"prompt": "Once", "max_tokens": 4}
        batch = await until_ended(mine, (await begin(mine, line("a", COMPLETION, body), COMPLETION)).id)
        assert batch.status == "completed"
        for file_id in (batch.input_file_id, batch.output_file_id):
            for call in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
                with pytest.raises(NotFoundError):
                    await call(file_id)
        with pytest.raises(NotFoundError):
            await theirs.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        for call in (theirs.batches.retrieve, theirs.batches.cancel):
            with pytest.raises(NotFoundError):
                await call(batch.id)
        assert (await theirs.files.list()).data == (await theirs.batches.list()).data == []
        assert len((await mine.batches.list()).data) == 1


async def test_without_a_directory_files_are_refused_by_the_flag_that_turns_them_on(gateway):
    for answer in (await gateway.http.get("/v1/files"), await gateway.http.post("/v1/batches", json={})):
        assert answer.status_code == 400
        assert "--batch-dir" in answer.json()["error"]["message"]


async def test_a_gateway_that_starts_goes_on_and_answers_each_request_once(scheduler, tmp_path):
    scheduler.step_delay_s = 0.01
    body = {"prompt": "Once", "max_tokens": 10}
    content = b"".join(line(f"r{number}", COMPLETION, body) for number in range(40))
    settings: dict[str, Any] = {"batch_dir": tmp_path / "b", "batch_concurrency": 4}
    async with running_gateway(scheduler, **settings) as gateway, client_of(gateway) as client:
        batch = await begin(client, content, COMPLETION)

        async def is_underway() -> bool:
            return (await client.batches.retrieve(batch.id)).request_counts.completed >= 8

        await until(is_underway)
    before = len(scheduler.submits)
    assert before < 40
    async with running_gateway(scheduler, **settings) as gateway, client_of(gateway) as client:
        batch = await until_ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)
        results = await results_of(client, batch.output_file_id)
    assert [each["custom_id"] for each in results] == [f"r{number}" for number in range(40)]
    # Only requests that ran when the first gateway stopped ran again.
    assert len(scheduler.submits) <= 40 + 4
