"""The scheduler's core and a worker's ledger and runner in one process, with the messages of the step protocol between
them and two steps in flight, without gRPC and threads."""

from collections import defaultdict, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.common.v1.common_pb2 import RowSampling as RowSamplingMessage
from quire.messages.arrays import encode_int32
from quire.messages.logprob_columns import LogprobColumns
from quire.messages.prefix_hashes import BlockHash
from quire.runtime.settings import load_settings
from quire.worker.v1 import worker_pb2
from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.request import Adapter, ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import ClientEvents, StepPlan, Usage
from scheduler_svc.service.worker_messages import StepAnswer, replica_info, step_answer, step_message
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.draft_choice import Guesses, PayingDrafts
from worker_svc.device.pass_times import PassCosts, PassTimes
from worker_svc.device.runner import ModelRunner
from worker_svc.protocol.step_messages import StepDecoder, info_message, result_message
from worker_svc.sampling.drafters import NO_DRAFT, Draft, Drafter, RowText
from worker_svc.settings import WorkerSettings
from worker_svc.startup import build_worker

_STEPS_IN_FLIGHT = 2
_COSTS = PassCosts([1, 64], [1e-2, 1.1e-2])
"""Costs of passes by their number of rows: more rows cost little."""


@dataclass
class Text:
    """The output of a sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[Any, ...]] = field(default_factory=list)
    end: tuple[Any, ...] | None = None
    vector: bytes = b""


def make_request(
    handle: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 40,
    seed: int = 0,
    logprobs: int | None = None,
    num_sequences: int = 1,
    num_returned: int | None = None,
    stop_token_ids: Sequence[int] = (),
    sampling: dict[str, Any] | None = None,
    stopping: dict[str, Any] | None = None,
    bad: Sequence[Sequence[int]] = (),
    rules: RowSamplingMessage | None = None,
    adapter: Adapter | None = None,
    predicted: Sequence[int] = (),
) -> Request:
    parameters = RowSamplingMessage(predicted_token_ids=encode_int32(predicted))
    for name, value in (sampling or {}).items():
        if name == "logit_bias":
            parameters.sampling.logit_bias.update(value)
        elif name == "constraint":
            parameters.sampling.constraint.CopyFrom(value)
        else:
            setattr(parameters.sampling, name, value)
    for name, value in (stopping or {}).items():
        setattr(parameters.stopping, name, value)
    parameters.stopping.stop_token_ids.extend(stop_token_ids)
    for each in bad:
        parameters.bad_token_sequences.add(ids=each)
    if rules is not None:
        parameters.MergeFrom(rules)
    return Request(
        RequestKey(ClientId(0), Handle(handle)),
        f"request-{handle}",
        list(prompt),
        RowSampling(seed, parameters.SerializeToString(), logprobs),
        max_tokens,
        frozenset(stop_token_ids),
        num_sequences=num_sequences,
        num_returned=num_returned or num_sequences,
        has_constraint=parameters.sampling.HasField("constraint"),
        adapter=adapter,
    )


class WholeEngine:
    """A worker with these flags, by default without drafts, and a new core for each run."""

    def __init__(self, *flags: str) -> None:
        flags = flags if "--speculate" in flags else (*flags, "--speculate=off")
        settings = load_settings(WorkerSettings, flags, {}, program="quire worker")
        self.worker = build_worker(settings, DeviceLoop())
        runner = self.worker.runner
        if isinstance(runner, ModelRunner) and runner._drafts is not None:
            # Costs that the worker measured differ from run to run.
            runner.choose_drafts(PayingDrafts(self.worker.info.limits.max_num_rows, PassTimes(_COSTS), _COSTS))
        self.num_drafts = self.num_accepted = self.num_steps = self.num_passes = 0
        self.usages: dict[int, Usage] = {}

    def use(self, drafter: Drafter) -> None:
        """Uses this drafter from now on."""
        runner = self.worker.runner
        assert isinstance(runner, ModelRunner)
        assert runner._drafts is not None
        runner._drafts._drafter = drafter
        runner.choose_drafts(EveryDraft())

    def run(
        self, requests: Sequence[Request], *, is_warm: bool = False, failing: Set[int] = frozenset(), **config: Any
    ) -> dict[tuple[int, int], Text]:
        """Runs all to their ends. Returns each sequence's output, by handle and index. If it is warm, the core begins
        with the blocks that the worker holds. The requests with the handles `failing` must fail, and no others."""
        info = replica_info(info_message(self.worker.info))
        values: dict[str, Any] = {
            "num_blocks": info.num_gpu_blocks,
            "block_size": info.block_size,
            "max_num_seqs": info.max_num_rows,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_model_len": info.max_model_len,
            "num_host_blocks": info.num_host_blocks,
            "max_drafts": info.max_drafts,
            "fixed_tokens": 1 << 16,
            "max_passes": info.max_passes,
            "state_blocks": info.state_blocks,
            "full_groups": self.worker.info.pool.groups.num_full,
            "windowed_groups": self.worker.info.pool.groups.num_windowed,
            "window": self.worker.info.pool.groups.window,
        }
        scheduler = Scheduler(SchedulerConfig(**(values | config)))
        if is_warm:
            sealed = self.worker.runner.sealed_blocks()
            hashes = [BlockHash(each.tobytes()) for each in sealed.hashes]
            scheduler.restore_sealed(zip(map(BlockId, sealed.block_ids.tolist()), hashes, strict=True))
        self.worker.ledger.reset()
        self.num_drafts = self.num_accepted = self.num_steps = self.num_passes = 0
        self.usages = {}
        decoder, texts = StepDecoder(self.worker.info), defaultdict[tuple[int, int], Text](Text)
        failed: set[int] = set()
        for request in requests:
            scheduler.submit(request, 0.0)
        answers: deque[StepAnswer] = deque()
        while True:
            while len(answers) < _STEPS_IN_FLIGHT and (plan := scheduler.schedule(0.0)) is not None:
                invariants.check(scheduler)
                answers.append(self._answer(plan, decoder, info.vocab_size))
            if not answers:
                self.preemptions, self.swap_outs = scheduler.num_preemptions, scheduler.num_swap_outs
                assert scheduler.num_live == scheduler.batch.blocks.pool.num_used == 0
                assert failed == failing
                return dict(texts)
            answer = answers.popleft()
            answer.check_rows(scheduler.in_flight[0])
            for events in scheduler.apply(answer.result, 0.0).values():
                _take(events, texts)
                failed.update(each.key.handle for each in events.failed)
                self.usages |= {int(end.handle): end.usage for end in events.completed}
            invariants.check(scheduler)

    def _answer(self, plan: StepPlan, decoder: StepDecoder, vocab_size: int) -> StepAnswer:
        self.num_steps += 1
        request = worker_pb2.RunRequest.FromString(step_message(plan, 0, self.worker.info.worker_generation))
        admitted = self.worker.ledger.admit(decoder.decode(request.step))
        output = self.worker.runner.launch(admitted).wait()
        self.worker.ledger.record_output(output)
        self.num_drafts += int(output.num_drafts.sum())
        self.num_passes += output.num_passes
        self.num_accepted += int(output.num_tokens.sum()) - output.num_passes * len(output.num_tokens)
        return step_answer(result_message(output).result, vocab_size)


def _take(events: ClientEvents, texts: dict[tuple[int, int], Text]) -> None:
    columns = zip(events.handles, events.sequence_indices, events.offsets, events.token_ids, strict=True)
    keys: list[tuple[int, int]] = []
    for handle, index, offset, token_id in columns:
        text = texts[handle, index]
        assert offset == len(text.token_ids), "a token was lost or repeated"
        text.token_ids.append(token_id)
        keys.append((handle, index))
    logprobs: LogprobColumns = events.logprobs.columns()
    for position, place in enumerate(events.with_logprobs):
        part = logprobs.part(position, position + 1)
        texts[keys[place]].logprobs.append(
            (
                part.chosen_logprobs.tolist(),
                part.chosen_ranks.tolist(),
                part.top_token_ids.tolist(),
                part.top_logprobs.tolist(),
            )
        )
    for end in events.finished:
        text = texts[end.handle, end.sequence_index]
        text.end, text.vector = (end.num_tokens, end.reason, end.stop_token_id), end.vector


class EveryDraft(PayingDrafts):
    """Verifies every guess."""

    def __init__(self) -> None:
        pass

    def enter(self, row: int) -> None:
        pass

    def begin_pass(self, num_rows: int, left_s: float, *, is_first: bool) -> bool:
        return True

    def are_due(self, rows: np.ndarray) -> np.ndarray:
        return np.ones(len(rows), np.bool_)

    def found_nothing(self, rows: Sequence[int], max_periods: Sequence[int]) -> None:
        pass

    def choose(self, guesses: Guesses, num_rows: int) -> np.ndarray:
        return guesses.num_tokens

    def plan(self, guesses: Guesses, num_rows: int, num_missing: int) -> np.ndarray:
        assert num_missing >= len(guesses.rows)
        return guesses.num_tokens

    def record_outcomes(self, guesses: Guesses, num_checked: np.ndarray, num_right: np.ndarray) -> None:
        assert (num_right <= num_checked).all()


class RightDrafter(Drafter):
    """Drafts the outputs of a run's sequences."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [np.array(text, np.int32) for text in texts]

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        token_ids, end = text.token_ids, len(text.token_ids)
        for each in self._texts:
            if len(each) > end and np.array_equal(each[:end], token_ids):
                return Draft(each[end : end + max_drafts])
        return NO_DRAFT


class WrongDrafter(Drafter):
    """Drafts the first tokens of another drafter's drafts, and then random ones, which include the lowest and the
    highest token id. Without another drafter all are random; the seed and the text decide."""

    def __init__(self, seed: int, vocab_size: int, right: Drafter | None = None) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._right = right

    def draft(self, text: RowText, max_drafts: int) -> Draft:
        rng = np.random.default_rng((self._seed, len(text.token_ids), int(text.token_ids[-1])))
        drafts = rng.integers(0, self._vocab_size, int(rng.integers(0, max_drafts + 1))).astype(np.int32)
        drafts[rng.random(len(drafts)) < 0.1] = 0
        drafts[rng.random(len(drafts)) < 0.1] = self._vocab_size - 1
        if self._right is not None:
            right = self._right.draft(text, len(drafts)).token_ids
            num_right = int(rng.integers(0, len(right) + 1))
            drafts[:num_right] = right[:num_right]
        return Draft(drafts)
