"""What the messages of a step stream say of traces, as values. A step is not checked here: that is the session's."""

from dataclasses import dataclass

from quire.arrays import decode_int32
from quire.rpc.errors import InvalidArgument
from quire.worker.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class StepOutline:
    """Which rows a step has to do with.

    Attributes:
        released: Rows that hold nothing any more.
        traced: The trace parents of rows that enter with this step.
        computed: Rows and how many of their tokens are computed.
        sampling: Rows that get a token.
    """

    step_id: int
    released: list[int]
    traced: dict[int, str]
    computed: dict[int, int]
    sampling: set[int]


def has_traces(request: worker_pb2.RunRequest) -> bool:
    """Whether the request is a step with which traced rows enter."""
    return bool(request.step.traced)


def outline_of(request: worker_pb2.RunRequest) -> StepOutline | None:
    """None for a step with malformed arrays."""
    step = request.step
    try:
        rows = decode_int32(step.batch.rows, "rows").tolist()
        num_new_tokens = decode_int32(step.batch.num_new_tokens, "num_new_tokens").tolist()
        return StepOutline(
            step.step_id,
            decode_int32(step.release, "release").tolist(),
            {traced.row: traced.traceparent for traced in step.traced},
            dict(zip(rows, num_new_tokens, strict=False)),
            # Pairs, of which the first is who samples.
            set(decode_int32(step.batch.samples, "samples")[::2].tolist()),
        )
    except InvalidArgument:
        return None


def answer_of(response: worker_pb2.RunResponse) -> tuple[int, int] | None:
    """Of the answer to a step its id, and the microseconds in the model; None for other responses."""
    if not response.HasField("result"):
        return None
    return response.result.step_id, response.result.timings.model_us
