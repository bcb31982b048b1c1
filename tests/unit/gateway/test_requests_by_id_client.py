"""Which replica a durable request is read from, where it has moved between them."""

from dataclasses import dataclass

import pytest

from gateway.schedulers.requests_by_id_client import find_durable
from quire.rpc.errors import NotFound, QuireError, Unavailable
from quire.scheduler.v1 import scheduler_pb2


@dataclass
class Replica:
    """Answers what the test says."""

    answer: scheduler_pb2.FindDurableResponse | QuireError

    async def ask(self, call):
        if isinstance(self.answer, QuireError):
            raise self.answer
        return self.answer


def having(num_tokens: int, *, is_over: bool = False) -> Replica:
    submit = scheduler_pb2.Submit(request_id="story", prompt_token_ids=b"")
    return Replica(scheduler_pb2.FindDurableResponse(submit=submit, is_over=is_over, generated_tokens=num_tokens))


NOTHING = Replica(NotFound("nothing"))
SILENT = Replica(Unavailable("not connected"))


async def found(*replicas: Replica) -> int:
    """The position of the replica that is chosen."""
    chosen = await find_durable(replicas, "acme", "story")
    return replicas.index(chosen.client)


@pytest.mark.parametrize(
    ("replicas", "position"),
    [
        ((having(5), NOTHING), 0),
        ((NOTHING, SILENT, having(5)), 2),
        # Left behind by the first one, which hung, and served on by the second one.
        ((having(5), having(9)), 1),
        ((having(9), having(5)), 0),
        ((having(5, is_over=True), having(9, is_over=True)), 1),
        # What is over there, though nobody read it to its end, is not what the caller has the begin of.
        ((having(9, is_over=True), having(5)), 1),
    ],
)
async def test_the_replica_that_goes_on_with_a_request_is_found_before_one_that_it_has_left(replicas, position):
    assert await found(*replicas) == position


@pytest.mark.parametrize(("replicas", "error"), [((NOTHING, NOTHING), NotFound), ((NOTHING, SILENT), Unavailable)])
async def test_what_no_replica_has_is_not_found_unless_one_could_not_be_asked(replicas, error):
    with pytest.raises(error):
        await found(*replicas)
