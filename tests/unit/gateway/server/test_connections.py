"""The bound on all bodies together, and who gives way when it is reached."""

import pytest

from gateway.server.connections import BodyMemory, HeldBody
from quire.rpc.errors import ResourceExhausted


class Bodies:
    """Bodies of one memory by name, and who was given up."""

    def __init__(self, max_bytes: int) -> None:
        self.memory = BodyMemory(max_bytes)
        self.given_up: list[str] = []

    def begin(self, name: str) -> HeldBody:
        return self.memory.begin(lambda: self.given_up.append(name))


def test_a_body_that_arrives_gives_way_to_a_newer_one():
    bodies = Bodies(100)
    first, second, third = (bodies.begin(name) for name in "abc")
    first.add(60)
    second.add(40)
    third.add(50)
    assert bodies.given_up == ["a"]
    assert [each.num_bytes for each in (first, second, third)] == [0, 40, 50]


def test_a_body_of_which_nothing_came_gives_way_to_nobody():
    bodies = Bodies(100)
    waiting, sending = bodies.begin("waiting"), bodies.begin("sending")
    sending.add(100)
    with pytest.raises(ResourceExhausted):
        sending.add(1)
    assert bodies.given_up == []
    waiting.add(100)


def test_bodies_that_came_whole_stay_and_the_new_one_is_refused():
    bodies = Bodies(100)
    whole = bodies.begin("whole")
    whole.add(60)
    whole.complete()
    late = bodies.begin("late")
    with pytest.raises(ResourceExhausted, match=r"take 100 B together.*--max-total-body-bytes.*try again") as refused:
        late.add(41)
    assert refused.value.reason == "BODIES_FULL"
    assert refused.value.retry_after_ms == 1000
    assert bodies.given_up == []
    whole.release()
    bodies.begin("next").add(100)
