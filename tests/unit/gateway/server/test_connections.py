"""The bound on all bodies together, and the bodies that give way when it is reached."""

from contextvars import copy_context

import pytest

from gateway.auth.caller import Access, Caller, set_caller
from gateway.auth.quota import Account, Limits
from gateway.request.body_memory import BodyMemory, HeldBody
from quire.rpc.errors import ResourceExhausted


class Bodies:
    """Bodies of one memory by name, and the names of bodies that were given up."""

    def __init__(self, max_bytes: int, max_tenant_bytes: int | None = None) -> None:
        self.memory = BodyMemory(max_bytes, max_tenant_bytes)
        self.given_up: list[str] = []

    def begin(self, name: str) -> HeldBody:
        return self.memory.begin(lambda: self.given_up.append(name))


def add(tenant: str, body: HeldBody, num_bytes: int) -> None:
    """Adds bytes as in a call of a tenant."""

    def call() -> None:
        set_caller(Caller(tenant, Access(), Account(Limits(), lambda: 0.0)))
        body.add(num_bytes)

    copy_context().run(call)


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
    with pytest.raises(
        ResourceExhausted, match=r"take 100 B of memory together.*--max-total-body-bytes.*try again"
    ) as refused:
        late.add(41)
    assert refused.value.reason == "BODIES_FULL"
    assert refused.value.retry_after_ms == 1000
    assert bodies.given_up == []
    whole.release()
    bodies.begin("next").add(100)


def test_a_tenant_that_holds_its_share_leaves_room_for_others():
    bodies = Bodies(100, 50)
    whole = bodies.begin("whole")
    add("a", whole, 60)
    whole.complete()
    with pytest.raises(ResourceExhausted, match=r"one tenant's requests may take 50 B") as refused:
        add("a", bodies.begin("more"), 1)
    assert refused.value.reason == "BODIES_FULL"
    slow, newer = bodies.begin("slow"), bodies.begin("newer")
    add("b", slow, 30)
    add("b", newer, 21)
    assert bodies.given_up == ["slow"]
    whole.release()
    add("a", bodies.begin("next"), 50)


def test_a_body_that_was_released_counts_nothing_more():
    bodies = Bodies(100)
    body = bodies.begin("a")
    body.add(10)
    body.release()
    body.add(10)
    assert bodies.memory.num_bytes == 0
    assert not bodies.memory.bytes_of_tenants


def test_the_values_of_a_body_that_is_alone_take_what_they_need():
    bodies = Bodies(100, 50)
    body = bodies.begin("a")
    body.add(50)
    body.complete()
    body.add(500)
    with pytest.raises(ResourceExhausted):
        bodies.begin("b").add(1)
    body.release()
    bodies.begin("b").add(100)
