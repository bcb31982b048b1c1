"""Today's code reads the messages of each release with the same meaning; a release reads messages of today's code."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from gateway.api.grpc.gateway_messages import options_of_chat, options_of_generate
from gateway.offload import FairExecutor
from gateway.replicas import request_messages
from gateway.replicas.cache_messages import CachedBlocks
from gateway.replicas.events import EventBatch, event_batch_from, welcome_from
from gateway.replicas.ledger import Ledger
from gateway.request.limits import limits_of
from gateway.request.parameters import CallParameters
from gateway.request.prepare import prepare
from gateway.request.served_model import ServedModel
from gateway.settings import GatewaySettings
from quire.gateway.v1 import generation_pb2
from quire.model_files.model_source import resolve_model
from quire.scheduler.v1 import scheduler_pb2
from quire.service.compatibility import (
    SCHEDULER_PROTOCOL,
    ModelFingerprint,
    ProtocolVersions,
    check_protocol,
    unknown_field,
)
from quire.worker.v1 import worker_pb2
from scheduler_svc.recording.files import open_frames
from scheduler_svc.recording.messages import Operation, request_of
from scheduler_svc.recording.replay import replay
from scheduler_svc.service.gateway_messages import request_from_submit
from scheduler_svc.service.worker_messages import replica_info, sealed_blocks, step_answer
from tests.compat.record import record
from tests.compat.transcript import (
    CONTRACTS,
    MESSAGES,
    RECORDING,
    Call,
    Contracts,
    decompressed,
    read_calls,
    releases,
    unknown_fields,
)
from tests.support.fake_pool import FakePool
from tests.support.fake_rows import FakeRows
from worker_svc.device.row_ledger import RowLedger
from worker_svc.protocol import step_messages as convert
from worker_svc.step import ModelGeometry, PoolGeometry, WorkerInfo, WorkerLimits

_GENERATION = "/quire.gateway.v1.GenerationService/"
_CONNECT = "/quire.scheduler.v1.SchedulerService/Connect"
_RUN = "/quire.worker.v1.WorkerService/Run"

ADDED = frozenset(
    {
        *(f"quire.worker.v1.WorkerLimits.{number}" for number in range(5, 9)),
        *(f"quire.worker.v1.KvPoolGeometry.{number}" for number in (9, 10)),
        "quire.worker.v1.WorkerInfo.9",
        "quire.worker.v1.WorkerInfo.10",
        "quire.gateway.v1.Replica.17",
        "quire.scheduler.v1.Welcome.16",
        "quire.scheduler.v1.Welcome.18",
        "quire.scheduler.v1.Welcome.19",
        "quire.scheduler.v1.Welcome.20",
        "quire.scheduler.v1.Welcome.21",
        *(f"quire.scheduler.v1.Welcome.{number}" for number in range(22, 28)),
        "quire.scheduler.v1.ReplicaState.3",
        "quire.scheduler.v1.CacheUpdate.5",
        "quire.scheduler.v1.CacheUpdate.6",
        "quire.scheduler.v1.ReplicaState.4",
        "quire.scheduler.v1.ReplicaState.5",
        *(f"quire.gateway.v1.Replica.{number}" for number in range(12, 17)),
        *(f"quire.scheduler.v1.ReplicaNumbers.{number}" for number in range(28, 48)),
    }
)
"""Fields, as TYPE.NUMBER, that today's code writes to every release, since an older one may ignore them. All other new
fields are written only to a side that reports a protocol version with them."""

PLANS_DIFFER = frozenset({"0.1.0"})
"""Releases whose steps today's scheduler plans in another way, on purpose: their recordings are read whole, and a
replay reports the first different step."""

Sequence = tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """The recorded messages of one release. `contracts` reads messages without any code of today."""

    directory: Path
    contracts: Contracts
    calls: list[Call]

    def of(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]

    @property
    def submits(self) -> Iterator[tuple[Any, scheduler_pb2.Submit]]:
        """Each submission as read by its release and by today's code."""
        for data in (data for call in self.of(_CONNECT) for data in call.requests):
            if (then := self.contracts.request(_CONNECT, data)).HasField("submit"):
                yield then.submit, scheduler_pb2.ConnectRequest.FromString(data).submit

    @property
    def answers(self) -> dict[str, list[Sequence]]:
        """By request id, the tokens of the sequences of each request that was answered in one message."""
        found: dict[str, list[Sequence]] = {}
        for call in (*self.of(f"{_GENERATION}Generate"), *self.of(f"{_GENERATION}Chat")):
            for data in call.responses:
                answer = self.contracts.response(call.method, data)
                found[answer.request_id] = [tuple(each.token_ids) for each in answer.sequences]
        return found

    @property
    def worker(self) -> tuple[worker_pb2.Attached, WorkerInfo]:
        """The worker's description of itself, and the same as today's worker has it."""
        (call,) = self.of(_RUN)
        attached = worker_pb2.RunResponse.FromString(call.responses[0]).attached
        info = attached.info
        pool, model, limits = (
            {field.name: value for field, value in message.ListFields()}
            for message in (info.pool, info.model, info.limits)
        )
        geometry = PoolGeometry(**pool), ModelGeometry(**model), WorkerLimits(**limits)
        return attached, WorkerInfo(info.worker_generation, info.rank, info.world_size, *geometry)


@pytest.fixture(scope="module", params=releases(), ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Release:
    directory = request.param
    return Release(directory, Contracts.read(directory / CONTRACTS), list(read_calls(directory / MESSAGES)))


async def test_a_request_of_a_client_is_submitted_as_it_was(release: Release) -> None:
    """From the client's bytes to the bytes for the scheduler: validation, chat template, tokenizer, defaults."""
    executor = FairExecutor(1)
    model = ServedModel.open(resolve_model(None), None, executor)
    welcome = welcome_from(scheduler_pb2.ConnectResponse.FromString(release.of(_CONNECT)[0].responses[0]).welcome)
    limits = limits_of(GatewaySettings(), [welcome], model.tokenizer.longest_token_bytes)
    asked = {
        request.request_id: request
        for name in ("Generate", "GenerateStream", "Chat", "ChatStream")
        for call in release.of(_GENERATION + name)
        for request in (getattr(generation_pb2, f"{name}Request").FromString(data) for data in call.requests)
    }
    submitted = {then.request_id: then for then, _ in release.submits}
    assert len(submitted) > 20
    for request_id, then in submitted.items():
        message = asked[request_id]
        is_chat = isinstance(message, generation_pb2.ChatRequest | generation_pb2.ChatStreamRequest)
        options = options_of_chat(message) if is_chat else options_of_generate(message)
        call = CallParameters()
        call.check(options, limits, model.name)
        request = await prepare(
            options, call, model, limits,
            request_id=request_id, tenant=then.tenant, priority=message.priority, trace=None,
        )  # fmt: skip
        live = Ledger(max_chunk_tokens=100).prepare(request, model.tokenizer)
        now = request_messages.submit_message(live).submit
        same = release.contracts.message("quire.scheduler.v1.Submit", now.SerializeToString())
        same.DiscardUnknownFields()
        for name in ("handle", "nonce", "emitted"):
            same.ClearField(name)
            then.ClearField(name)
        if not message.sampling.HasField("seed"):
            same.sampling.seed = then.sampling.seed
        rows = [release.contracts.message("quire.common.v1.RowSampling", each.row_sampling) for each in (same, then)]
        rows[0].DiscardUnknownFields()
        if not rows[1].HasField("stopping"):
            # Then workers got the field only if it changes logits. Without min_tokens it changes none.
            told = rows[0].stopping
            assert not told.min_tokens
            assert {*told.stop_token_ids} == {*then.stopping.stop_token_ids, *then.eos_token_ids}
            rows[0].ClearField("stopping")
        if is_chat and message.tools:
            # Today's grammar for calls differs. Its kind is one that workers of the release compile.
            assert rows[0].sampling.constraint.WhichOneof("kind") in ("lark", "structural_tags", "json_schema")
            for row in rows:
                row.sampling.constraint.Clear()
        assert rows[0] == rows[1], request_id
        same.row_sampling = then.row_sampling
        assert same == then, request_id
    model.constraints.close()
    executor.shutdown()


def test_a_submission_is_the_core_request_that_it_was(release: Release) -> None:
    welcome = scheduler_pb2.ConnectResponse.FromString(release.of(_CONNECT)[0].responses[0]).welcome
    seen = Counter[str]()
    for then, now in release.submits:
        request = request_from_submit(now, vocab_size=welcome.vocab_size, max_num_seqs=welcome.max_num_seqs)
        sampling = then.sampling
        assert (request.request_id, request.tenant, request.priority) == (then.request_id, then.tenant, then.priority)
        assert request.prompt == np.frombuffer(then.prompt_token_ids, "<i4").tolist()
        assert request.max_tokens == then.stopping.max_tokens
        assert request.stop_token_ids == {*then.stopping.stop_token_ids, *then.eos_token_ids}
        assert request.num_returned == (sampling.n or 1)
        assert (request.sampling.seed, request.sampling.parameters) == (sampling.seed, then.row_sampling)
        assert request.sampling.logprobs == (then.output.logprobs if then.output.HasField("logprobs") else None)
        assert request.has_constraint == then.has_constraint
        assert [list(each.token_ids) for each in request.emitted] == [
            np.frombuffer(each.token_ids, "<i4").tolist() for each in then.emitted
        ]
        if request.beam is not None:
            assert (request.beam.width, round(request.beam.length_penalty, 6)) == (3, 0.8)
        if then.durable:
            again = request_messages.request_from_submit(now)
            assert (again.request_id, list(again.stopping.stop)) == (then.request_id, list(then.stopping.stop))
            assert again.seed == sampling.seed
        seen.update(
            beams=request.beam is not None, several=request.num_sequences > 1, constraint=request.has_constraint,
            emitted=bool(request.emitted), durable=then.durable,
        )  # fmt: skip
    assert all(seen.values()), seen


def test_events_are_the_tokens_that_clients_got(release: Release) -> None:
    names: dict[int, str] = {}
    num_held = {then.request_id: sum(len(each.token_ids) // 4 for each in then.emitted) for then, _ in release.submits}
    outputs: dict[tuple[str, int], list[int]] = defaultdict(list)
    ended: dict[str, int] = {}
    first = release.of(_CONNECT)[0]
    for is_request, data in first.messages:
        if is_request:
            message = release.contracts.request(_CONNECT, data)
            for kind in (message.submit, message.resume):
                names[kind.handle] = kind.request_id
            continue
        batch = event_batch_from(scheduler_pb2.ConnectResponse.FromString(data).events)
        for run in batch.runs:
            output = outputs[names[run.handle], run.sequence_index]
            # A resumed request is read from its beginning.
            output[run.offset - num_held[names[run.handle]] :] = run.token_ids
        ended.update({names[end.handle]: end.usage.generated_tokens for end in batch.completed if end.usage})
        _check_logprobs(batch)
    answers = release.answers
    assert len(answers) > 8
    for request_id, sequences in answers.items():
        got = [tuple(outputs[request_id, index]) for index in range(len(sequences))]
        # A stop string ends an answer before tokens that had already come.
        assert all(longer[: len(answer)] == answer for answer, longer in zip(sequences, got, strict=True)), request_id
        assert ended[request_id] >= max(map(len, sequences))
    updates = [
        message.cache
        for call in release.of(_CONNECT)
        for message in map(scheduler_pb2.ConnectResponse.FromString, call.responses)
        if message.HasField("cache")
    ]
    assert updates[0].cleared
    cached = CachedBlocks()
    for update in updates:
        cached.update(update)
    assert any(update.stored for update in updates)


def _check_logprobs(batch: EventBatch) -> None:
    for run in batch.runs:
        if run.logprobs is not None:
            assert len(run.logprobs) == len(run.token_ids)
            assert (run.logprobs.chosen_logprobs <= 0).all()
    for prompt in batch.prompt_runs:
        assert len(prompt.columns) == len(prompt.token_ids)


def test_steps_and_results_are_the_computation_that_they_were(release: Release) -> None:
    """A pool whose blocks record their contents follows the steps: each row reads what it wrote, through forks, copies
    and swaps. With the tokens of the results the rows hold the sequences that clients got."""
    (call,) = release.of(_RUN)
    attached, info = release.worker
    replica = replica_info(attached.info)
    assert sealed_blocks(attached) == []
    assert convert.epoch_of(worker_pb2.RunRequest.FromString(call.requests[0])) == attached.scheduler_epoch
    decoder, ledger = convert.StepDecoder(info), RowLedger(info.pool, info.model, info.limits)
    pool = FakePool(info.pool.num_gpu_blocks, info.pool.num_host_blocks, info.pool.block_size)
    rows = FakeRows(info.pool.block_size)
    steps = [
        message.step for message in map(worker_pb2.RunRequest.FromString, call.requests) if message.HasField("step")
    ]
    results = [
        message.result
        for message in map(worker_pb2.RunResponse.FromString, call.responses)
        if message.HasField("result")
    ]
    held: set[Sequence] = set()
    seen = Counter[str]()
    for message, result in zip(steps, results, strict=True):
        step, answer = decoder.decode(message), step_answer(result, replica.vocab_size)
        ledger.admit(step)
        pool.move(step.cache_operations)
        rows.apply_row_changes(step.row_changes)
        rows.compute(step.batch, pool)
        assert answer.result.step_id == step.step_id
        assert answer.rows.tolist() == step.batch.samples[:, 0].tolist()
        for row, token_id in zip(answer.rows.tolist(), answer.result.token_ids.tolist(), strict=True):
            if row not in answer.result.candidates:
                rows[row].prefixes.append(token_id)
            held.add(tuple(rows[row].prefixes.token_ids))
        operations, changes = step.cache_operations, step.row_changes
        seen.update(
            swap_out=len(operations.swap_out),
            swap_in=len(operations.swap_in),
            copy=len(operations.copy),
            assign=len(changes.assign),
            fork=len(changes.fork),
            reseed=len(changes.reseed),
            set_tokens=len(changes.set_tokens),
            release=len(changes.release),
            tables=len(changes.block_table_deltas),
            sealed=len(step.sealed.block_ids),
            candidates=len(answer.result.candidates),
            logprobs=answer.result.logprobs is not None,
            prompt_logprobs=len(answer.prompt_logprobs),
        )
    assert all(seen.values()), seen
    prompts = {
        then.request_id: np.frombuffer(
            b"".join((then.prompt_token_ids, *(each.token_ids for each in then.emitted))), "<i4"
        )
        for then, _ in release.submits
    }
    for request_id, sequences in release.answers.items():
        for sequence in sequences:
            # The last token of a beam is chosen and enters no row.
            whole = (*prompts[request_id].tolist(), *sequence)
            assert whole in held or whole[:-1] in held, request_id


def test_both_sides_of_each_connection_fit_those_of_today(release: Release) -> None:
    for call in release.of(_CONNECT):
        hello = scheduler_pb2.ConnectRequest.FromString(call.requests[0]).hello
        welcome = scheduler_pb2.ConnectResponse.FromString(call.responses[0]).welcome
        for theirs in (hello.protocol, welcome.protocol):
            versions = ProtocolVersions.of(theirs)
            check_protocol(
                "quire.scheduler.v1", SCHEDULER_PROTOCOL, versions, us="this one", them=release.directory.name
            )
        # The model is the current one, and so is its fingerprint.
        assert ModelFingerprint.of(hello.model).tokenizer == ModelFingerprint.of(welcome.model).tokenizer != ""


def test_a_recording_replays(release: Release, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.write_bytes(decompressed(release.directory / RECORDING))
    header, frames = open_frames(path)
    assert header.version == release.directory.name
    operations = [Operation.FromString(frame) for frame in frames]
    assert all(operation.WhichOneof("operation") and unknown_field(operation) is None for operation in operations)
    submitted = [request_of(operation.submit) for operation in operations if operation.HasField("submit")]
    # A pin is a request, too.
    assert {request.request_id for request in submitted} >= {then.request_id for then, _ in release.submits}
    report = replay(path)
    assert report.damage is None
    if release.directory.name in PLANS_DIFFER:
        assert report.differences
    else:
        assert report.is_equal, (report.differences, report.ended_early)
        assert (report.num_operations, report.num_requests) == (len(operations), len(submitted))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def calls_of_today() -> list[Call]:
    return list(map(without_batches, (await record()).calls))


def without_batches(call: Call) -> Call:
    """The same with the messages of batches one by one, as a scheduler without Welcome.takes_batches gets them."""
    if call.method != _CONNECT:
        return call
    messages = list[tuple[bool, bytes]]()
    for is_request, data in call.messages:
        batched = scheduler_pb2.ConnectRequest.FromString(data).batch.messages if is_request else ()
        messages += [(is_request, each) for each in batched or (data,)]
    return replace(call, messages=messages)


@pytest.mark.extended
async def test_a_release_reads_what_the_services_of_today_write(release: Release, calls_of_today: list[Call]) -> None:
    """Checks without their descriptors: no field, method or kind of message that the release lacks, and answers to the
    same requests, whose text comes from another quire-tiny."""
    today = Release(release.directory, release.contracts, calls_of_today)
    kinds: list[set[tuple[str, ...]]] = []
    for calls in (release.calls, today.calls):
        kinds.append(set())
        for call in calls:
            for is_request, data in call.messages:
                read = release.contracts.request if is_request else release.contracts.response
                message = read(call.method, data)
                assert set(unknown_fields(message)) <= ADDED, call.method
                chosen = (message.WhichOneof(oneof.name) or "" for oneof in message.DESCRIPTOR.oneofs)
                kinds[-1].add((call.method, "request" if is_request else "response", *chosen))
    assert kinds[1] == kinds[0]
    lengths = [{name: list(map(len, answer)) for name, answer in each.answers.items()} for each in (today, release)]
    # These requests end at a text, which the two models reach at different places.
    samples = [each.pop("samples") for each in lengths]
    assert len(samples[0]) == len(samples[1])
    assert lengths[0] == lengths[1]
    submitted = [{then.request_id: len(then.prompt_token_ids) for then, _ in each.submits} for each in (today, release)]
    assert submitted[0] == submitted[1]
    assert {call.method: call.status for call in today.calls} == {call.method: call.status for call in release.calls}
