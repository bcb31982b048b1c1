"""The core under any interleaving of arrivals, steps, results, aborts and worker losses, against what each request must
get. Invariants are checked after every rule."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.errors import NeverFitsError, QueueFullError
from scheduler_svc.core.request import Request
from scheduler_svc.core.submission import most_blocks
from tests.support.core_driver import Driver, expected_output, make_config, make_request


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 3, 4, 16]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        watermark=st.sampled_from([0.0, 0.1, 0.5]),
        max_in_flight=st.integers(1, 3),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, watermark, max_in_flight):
        config = make_config(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=40,
            watermark=watermark,
            max_waiting_requests=6,
        )
        self.driver = Driver(config, max_in_flight)
        self.requests: dict[int, Request] = {}
        self.aborted: set[int] = set()

    @rule(
        prompt_len=st.integers(1, 30),
        shared=st.integers(0, 30),
        tenant=st.sampled_from(["a", "a", "b"]),
        max_tokens=st.integers(1, 20),
        stop=st.sets(st.integers(0, 49), max_size=3),
        num_sequences=st.sampled_from([1, 1, 2, 3]),
    )
    def arrive(self, prompt_len, shared, tenant, max_tokens, stop, num_sequences):
        """A prompt whose first `shared` tokens are those of all others."""
        handle = len(self.requests) + len(self.aborted)
        prompt = [0] * min(shared, prompt_len) + [handle % 50] * max(prompt_len - shared, 0)
        request = make_request(
            handle,
            prompt=prompt,
            tenant=tenant,
            max_tokens=max_tokens,
            stop=frozenset(stop),
            num_sequences=num_sequences,
        )
        config = self.driver.scheduler.config
        fits = (
            request.max_len <= config.max_len
            and num_sequences <= config.max_num_seqs
            and most_blocks(request, config.block_size) <= config.num_blocks
        )
        try:
            self.driver.submit(request)
        except NeverFitsError:
            assert not fits
        except QueueFullError:
            # Requests that were preempted wait beyond the bound.
            assert len(self.driver.scheduler.waiting) >= 6
        else:
            assert fits
            self.requests[handle] = request

    @rule()
    def step(self):
        self.driver.plan()

    @rule()
    def result(self):
        self.driver.deliver()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        handle = data.draw(st.sampled_from(sorted(self.requests)))
        live = handle not in self.driver.finished
        assert self.driver.scheduler.abort(self.requests[handle].key) == live
        if live:
            del self.requests[handle]
            self.aborted.add(handle)

    @rule()
    def lose_worker(self):
        self.driver.crash()

    @invariant()
    def holds(self):
        if not hasattr(self, "driver"):
            return
        self.driver.check()
        for handle, request in self.requests.items():
            for index in range(request.num_sequences):
                output = self.driver.samples[handle, index]
                assert output == expected_output(request, index)[: len(output)]

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.driver.run_until_idle()
        for handle, request in self.requests.items():
            for index in range(request.num_sequences):
                assert self.driver.samples[handle, index] == expected_output(request, index)
        assert self.driver.finished == set(self.requests)
        assert self.driver.scheduler.blocks.pool.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
