"""What log probabilities of prompts cost the processes that they pass: those of one step, from message to message.

While the scheduler's or the gateway's event loop is at it, nothing else happens there: no step, no token of anybody.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.report import Series, write_results
from gateway.replicas.events import TokenLogprobs, event_batch_from
from quire.arrays import encode_logprobs
from quire.logprob_columns import LogprobColumns
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.service.gateway_messages import events_message
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.worker_messages import step_answer

_VOCAB_SIZE = 32_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=2048, help="prompt tokens of the step")
    parser.add_argument("--top", type=int, default=20, help="log probabilities at each besides its own")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    from_worker = _step_result(arguments.tokens, arguments.top)
    request = Request(
        key=RequestKey(ClientId(0), Handle(1)),
        request_id="bench",
        prompt=list(range(arguments.tokens + 1)),
        sampling=RowSampling(seed=0),
        max_tokens=1,
        stop_token_ids=frozenset(),
    )
    from_scheduler = _through_scheduler(from_worker, request)
    kept = _through_gateway(from_scheduler)
    times: dict[str, list[float]] = {"scheduler's loop": [], "gateway's loop": [], "gateway's thread": []}
    for _ in range(arguments.runs):
        times["scheduler's loop"].append(_milliseconds(lambda: _through_scheduler(from_worker, request)))
        times["gateway's loop"].append(_milliseconds(lambda: _through_gateway(from_scheduler)))
        times["gateway's thread"].append(_milliseconds(lambda: list(kept)))
    series = [Series(name, "ms", tuple(values)) for name, values in times.items()]
    print(*series, sep="\n")
    if arguments.out is not None:
        sizes = {"from_worker_bytes": len(from_worker), "from_scheduler_bytes": len(from_scheduler)}
        write_results(arguments.out, "log probabilities of a step's prompt tokens, on their way", series, **sizes)


def _step_result(num_tokens: int, num_top: int) -> bytes:
    """What a worker says, of one row."""
    rng = np.random.default_rng(0)
    columns = LogprobColumns.of_lines(
        rng.standard_normal(num_tokens, np.float32),
        rng.integers(1, _VOCAB_SIZE, num_tokens, np.int32),
        rng.integers(0, _VOCAB_SIZE, (num_tokens, num_top), np.int32),
        rng.standard_normal((num_tokens, num_top), np.float32),
    )
    result = worker_pb2.StepResult(step_id=1)
    encode_logprobs(columns, result.prompt_logprobs.add(row=0, first_position=1))
    return result.SerializeToString()


def _through_scheduler(message: bytes, request: Request) -> bytes:
    answer = step_answer(worker_pb2.StepResult.FromString(message), _VOCAB_SIZE)
    outgoing = Outgoing(prompt_logprobs=[each.of(request) for each in answer.prompt_logprobs])
    return events_message(outgoing).SerializeToString()


def _through_gateway(message: bytes) -> TokenLogprobs:
    kept = TokenLogprobs()
    for run in event_batch_from(scheduler_pb2.ConnectResponse.FromString(message).events).prompt_runs:
        kept.add(run.token_ids, run.columns)
    return kept


def _milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000
