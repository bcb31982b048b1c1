"""The core under any interleaving of arrivals, steps, results, aborts, preemptions, pins, constraints that the worker
compiles or that fail, offers of requests that run elsewhere, refused and deadly steps, losses of the worker, and
workers that come back with another pool, against what each request must get. Invariants are checked after every rule,
and the log of the prefix cache against its content."""

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core import kv_cache, preparation
from scheduler_svc.core.beam_search import BeamParameters, EarlyStopping
from scheduler_svc.core.config import PolicyKind, PreemptionMode
from scheduler_svc.core.fault_isolation import LOSSES_BEFORE_TRIALS, LOSSES_ON_TRIAL
from scheduler_svc.core.request import (
    Adapter,
    Handle,
    NeverFitsError,
    NoAdaptersError,
    PinQuotaError,
    QueueFullError,
    RefusedError,
    Request,
    max_blocks,
)
from tests.support.cache_mirror import CacheMirror
from tests.support.core_driver import CLIENT, Driver, continued, expected_output, make_config, make_request
from tests.support.tiers import few_examples

ADAPTERS = st.sampled_from([b"", b"", b"\x01", b"\x02", b"\x03", b"\x04"])
CONSTRAINTS = st.sampled_from([b"", b"", b"a", b"b", b"c", b"d"])

_FIRST_OFFER = 1000


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 24),
        num_host_blocks=st.sampled_from([0, 3, 12, 40]),
        caches_on_host=st.booleans(),
        block_size=st.sampled_from([1, 3, 4, 16]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 20),
        watermark=st.sampled_from([0.0, 0.1, 0.5]),
        policy=st.sampled_from(PolicyKind),
        preemption_mode=st.sampled_from(PreemptionMode),
        max_pinned=st.sampled_from([0.3, 1.0]),
        max_in_flight=st.integers(1, 3),
        max_prefill_share=st.sampled_from([0.1, 0.5, 1.0]),
        max_mixed_prefill_tokens=st.sampled_from([None, 3, 5]),
        max_reclaimed=st.sampled_from([1, 256]),
        is_cache_watched=st.booleans(),
        prepares_constraints=st.booleans(),
        num_kept=st.sampled_from([1, 2, 64]),
        max_adapters=st.sampled_from([0, 1, 2, 3]),
        max_drafts=st.sampled_from([0, 1, 3, 7]),
        fixed_tokens=st.sampled_from([0, 16, 1000]),
        groups=st.sampled_from([(1, 0, 0), (1, 0, 0), (1, 1, 3), (1, 2, 7), (0, 1, 5), (2, 3, 18)]),
        state_blocks=st.sampled_from([0, 0, 0, 1, 2, 5]),
    )
    def start(self, max_in_flight, budget, max_pinned, max_reclaimed, is_cache_watched, num_kept, groups, **config):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(kv_cache, "_MAX_RECLAIMED", max_reclaimed)
        self.patch.setattr(preparation, "NUM_KEPT", num_kept)
        config |= dict(zip(("full_groups", "windowed_groups", "window"), groups, strict=True))
        config["num_blocks"] = config["num_blocks"] * sum(groups[:2]) + 4 * config["state_blocks"]
        budget = max(budget, config["max_num_seqs"] + 2 if config["state_blocks"] else 0)
        config |= {"pin_quota": max_pinned, "max_pinned": max_pinned, "max_num_batched_tokens": budget}
        self.driver = Driver(make_config(max_model_len=40, max_waiting_requests=6, **config), max_in_flight)
        self.mirror = CacheMirror(self.driver.scheduler, ("", "a", "b"))
        self.is_cache_watched = is_cache_watched
        """Whether the mirror is compared after each operation; otherwise after some."""
        self.requests: dict[int, Request] = {}
        self.expected: dict[tuple[int, int], list[int]] = {}
        self.aborted: set[int] = set()
        self.killed: set[int] = set()
        self.offers: list[Request] = []
        """Requests that run at another replica, and may come."""
        self.losses: dict[int, tuple[int, int]] = {}
        """The tokens that a request had at the last loss with its step in flight, and the number of losses in a row."""

    @rule(
        prompt_len=st.integers(1, 30),
        shared=st.integers(0, 30),
        tenant=st.sampled_from(["a", "a", "b"]),
        max_tokens=st.integers(1, 20),
        stop=st.sets(st.integers(0, 49), max_size=3),
        num_sequences=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        constraint=CONSTRAINTS,
        adapter=ADAPTERS,
        prompt_logprobs_start=st.sampled_from([None, None, 1, 9]),
        held=st.none() | st.lists(st.integers(0, 20), min_size=3, max_size=3),
    )
    def arrive(self, prompt_len, shared, stop, held, **fields):
        """A prompt whose first `shared` tokens are common to all prompts. The first `held` tokens of each sequence are
        already there."""
        handle = len(self.requests) + len(self.aborted)
        prompt = self._prompt(handle, prompt_len, shared)
        request = make_request(handle, prompt=prompt, stop=frozenset(stop), **fields)
        if held is not None:
            request = continued(request, held[: request.num_sequences])
        if not request.emitted or not all(each.has_ended for each in request.emitted):
            self._submit(request)

    @rule(
        prompt_len=st.integers(1, 20),
        shared=st.integers(0, 20),
        max_tokens=st.integers(1, 16),
        stop=st.sets(st.integers(0, 49), max_size=2),
        width=st.integers(1, 4),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from(EarlyStopping),
        constraint=CONSTRAINTS,
        adapter=ADAPTERS,
    )
    def arrive_with_beams(self, prompt_len, shared, stop, width, length_penalty, early_stopping, **fields):
        handle = len(self.requests) + len(self.aborted)
        fields |= {"num_sequences": width, "num_returned": (width + 1) // 2, "stop": frozenset(stop)}
        beam = BeamParameters(width, length_penalty, early_stopping)
        self._submit(make_request(handle, prompt=self._prompt(handle, prompt_len, shared), beam=beam, **fields))

    @rule(prompt_len=st.integers(1, 30), shared=st.integers(0, 30), num_sequences=st.sampled_from([1, 1, 2]))
    def offer(self, prompt_len, shared, num_sequences):
        handle = _FIRST_OFFER + len(self.offers)
        request = make_request(handle, prompt=self._prompt(handle, prompt_len, shared), num_sequences=num_sequences)
        if self._fits(request):
            self.offers.append(replace(request, is_offer=True, accepted_before=True))
            self.driver.submit(self.offers[-1])

    @precondition(lambda self: self.offers)
    @rule(data=st.data(), is_broken=st.booleans(), max_tokens=st.integers(1, 20))
    def come(self, data, is_broken, max_tokens):
        """A request that was offered comes, or the blocks kept for it are given back."""
        offer = data.draw(st.sampled_from(self.offers))
        if is_broken:
            self.driver.scheduler.abort(offer.key)
            return
        handle = len(self.requests) + len(self.aborted)
        request = make_request(handle, prompt=list(offer.prompt), max_tokens=max_tokens)
        self._submit(replace(request, replaces=offer.key.handle, accepted_before=True))

    def _prompt(self, handle, prompt_len, shared):
        return [0] * min(shared, prompt_len) + [handle % 50] * max(prompt_len - shared, 0)

    def _fits(self, request):
        config = self.driver.scheduler.config
        return (
            request.max_len <= config.max_len
            and request.num_sequences <= config.max_num_seqs
            and max_blocks(request, config) <= config.num_usable_blocks
        )

    def _submit(self, request):
        handle = request.key.handle
        fits = self._fits(request)
        has_slots = request.adapter is None or self.driver.scheduler.config.max_adapters
        try:
            self.driver.submit(request)
        except NoAdaptersError:
            assert not has_slots
        except NeverFitsError:
            assert not fits
        except QueueFullError:
            # Preempted requests wait beyond the bound.
            assert len(self.driver.scheduler.waiting) >= 6
        else:
            assert fits
            assert has_slots
            self.requests[handle] = request
            for index in range(request.num_returned):
                self.expected[handle, index] = expected_output(request, index)

    def _live(self):
        """Handles of all requests that are not over."""
        keys = [group.request.key for group in self.driver.scheduler.groups()]
        return {key.handle for key in keys if key.client == CLIENT and key.handle < _FIRST_OFFER}

    @rule()
    def step(self):
        scheduler = self.driver.scheduler
        before = [group for queue in (scheduler.waiting, scheduler.swapped) for group in queue]
        are_trials = scheduler.trials.are_on
        self.driver.plan()
        if are_trials or scheduler.trials.are_on or scheduler.config.policy is PolicyKind.FAIR:
            return
        entered = [group.order for group in before if group.request.key in scheduler.running]
        queues = (scheduler.waiting, scheduler.swapped)
        left = [
            group.order
            for group in before
            if any(group.request.key in queue and not queue.is_held(group.request.key) for queue in queues)
        ]
        assert max(entered, default=0) <= min(left, default=math.inf), "a group entered the batch past a better one"

    @rule()
    def result(self):
        at_stake, num_deaths = self._at_stake(), self.driver.num_deaths
        self.driver.deliver()
        if self.driver.num_deaths > num_deaths:
            self._count_loss(at_stake)

    @rule()
    def tell(self):
        """The worker gets the constraints to compile, and the adapters to load."""
        self.driver.tell()

    @precondition(lambda self: self.driver.told)
    @rule()
    def compile(self):
        """The worker has compiled or loaded one of them, or cannot load it."""
        before = set(self.driver.failed)
        self.driver.compile_next()
        self.killed |= self.driver.failed - before

    @rule(adapter=ADAPTERS, is_there=st.booleans())
    def change_adapter(self, adapter, is_there):
        """From now on the worker can load an adapter, or cannot."""
        (self.driver.unloadable.discard if is_there else self.driver.unloadable.add)(adapter)

    @precondition(lambda self: self.driver.told)
    @rule()
    def give_up(self):
        """The worker takes too long for one of them."""
        before = set(self.driver.failed)
        self.driver.give_up_next()
        self.killed |= self.driver.failed - before

    @precondition(lambda self: self.requests and not (self.driver.deadly or self.driver.deadly_needs))
    @rule(num_slots=st.integers(1, 90), is_only_there=st.booleans())
    def keep_on_disk(self, num_slots, is_only_there):
        """All requests end, the worker writes blocks to its disk, which may then be their only place, and the longest
        prompt comes again."""
        before = set(self.driver.failed)
        self.driver.run_until_idle()
        self.killed |= self.driver.failed - before
        changed = self.driver.device.keep_on_disk(num_slots)
        if is_only_there:
            self.driver.scheduler.forget_cached()
            changed = list(self.driver.device.disk)
        self.driver.tell_disk(changed)
        request = max(self.requests.values(), key=lambda each: len(each.prompt))
        self._submit(replace(request, key=request.key._replace(handle=Handle(len(self.requests) + len(self.aborted)))))

    @precondition(lambda self: self.driver.device.disk)
    @rule(data=st.data(), is_told=st.booleans())
    def lose_on_disk(self, data, is_told):
        """A block on disk is damaged, which the worker finds or has yet to find."""
        slot = data.draw(st.sampled_from(sorted(self.driver.device.disk)))
        del self.driver.device.disk[slot]
        if is_told:
            self.driver.tell_disk([slot])

    def _at_stake(self):
        """The number of tokens of each request that count at a loss of the worker."""
        scheduler = self.driver.scheduler
        return {group.request.key: group.num_tokens for group in scheduler.running} if scheduler.in_flight else {}

    def _count_loss(self, at_stake):
        for key, num_tokens in at_stake.items():
            before, in_a_row = self.losses.get(key.handle, (num_tokens, 0))
            self.losses[key.handle] = (num_tokens, in_a_row + 1 if before == num_tokens else 1)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        handle = data.draw(st.sampled_from(sorted(self.requests)))
        live = handle not in self.driver.finished | self.driver.failed
        assert self.driver.scheduler.abort(self.requests[handle].key) == live
        if live:
            del self.requests[handle]
            self.aborted.add(handle)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), index=st.integers(0, 3))
    def abort_sequence(self, data, index):
        handle = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[handle]
        live = handle not in self.driver.finished | self.driver.failed
        assert self.driver.scheduler.abort_sequence(request.key, index) == live
        if not live or request.selects or index >= request.num_sequences:
            return
        # No token follows.
        self.expected[handle, index] = list(self.driver.samples[handle, index])
        if handle not in self._live():
            del self.requests[handle]
            self.aborted.add(handle)

    @precondition(lambda self: bool(self.driver.scheduler.running))
    @rule(data=st.data())
    def preempt(self, data):
        key = data.draw(st.sampled_from([group.request.key for group in self.driver.scheduler.running]))
        self.driver.preempt(self.driver.scheduler.running.get(key).request)

    @rule(
        length=st.integers(0, 30),
        tenant=st.sampled_from(["a", "b"]),
        time_to_live=st.sampled_from([2.0, 50.0]),
        adapter=ADAPTERS,
    )
    def pin(self, length, tenant, time_to_live, adapter):
        scheduler = self.driver.scheduler
        named = Adapter(adapter) if adapter else None
        try:
            pin = scheduler.pin(tenant, [0] * length, self.driver.clock, time_to_live, named)
        except NoAdaptersError:
            assert named is not None
            assert not scheduler.config.max_adapters
        except (PinQuotaError, QueueFullError, NeverFitsError):
            assert length >= scheduler.config.block_size
        except RefusedError:
            assert length < scheduler.config.block_size
        else:
            config, num_logical = scheduler.config, length // scheduler.config.block_size
            num_windowed = num_logical - config.layout.first_block_read(num_logical * config.block_size)
            num_blocks = config.full_groups * num_logical + config.windowed_groups * num_windowed
            assert len(pin.hashes) == num_blocks + config.state_blocks * (num_logical > 1)

    @precondition(lambda self: bool(self.driver.scheduler.pins))
    @rule(data=st.data())
    def unpin(self, data):
        scheduler = self.driver.scheduler
        pin = data.draw(st.sampled_from(list(scheduler.pins)))
        assert not scheduler.unpin("c", pin.pin_id)
        assert scheduler.unpin(pin.tenant, pin.pin_id)

    @rule()
    def forget_cached(self):
        pool = self.driver.scheduler.batch.blocks.pool
        num_held = pool.num_used
        num_cached = pool.num_cached
        num_forgotten = self.driver.scheduler.forget_cached()
        assert (pool.num_cached, pool.num_used) == (num_cached - num_forgotten, num_held)
        assert self.driver.scheduler.forget_cached() == 0

    @rule(was_alive=st.booleans())
    def lose_worker(self, was_alive):
        failed = set(self.driver.failed)
        self._count_loss(self._at_stake())
        self.driver.crash(was_alive=was_alive)
        for handle in self.driver.failed - failed:
            assert self.losses[handle][1] >= LOSSES_BEFORE_TRIALS + LOSSES_ON_TRIAL
            self.killed.add(handle)

    @rule(num_blocks=st.integers(4, 24), block_size=st.sampled_from([1, 3, 4, 16]), max_num_seqs=st.integers(1, 6))
    def get_another_pool(self, num_blocks, block_size, max_num_seqs):
        """The worker is lost, and comes back with another pool."""
        before = set(self.driver.failed)
        self._count_loss(self._at_stake())
        config = self.driver.scheduler.config
        if config.state_blocks:
            max_num_seqs = min(max_num_seqs, config.max_num_batched_tokens - 2)
        config = replace(
            config,
            num_blocks=num_blocks * config.layout.num_groups + 4 * config.state_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
        )
        self.driver.crash(config=config)
        self.mirror.watch(self.driver.scheduler)
        for handle in self.driver.failed - before:
            if handle >= _FIRST_OFFER:
                continue
            was_lost_for = self.losses.get(handle, (0, 0))[1] >= LOSSES_BEFORE_TRIALS + LOSSES_ON_TRIAL
            assert was_lost_for or not self._fits(self.requests[handle])
            self.killed.add(handle)
        assert all(self._fits(self.requests[handle]) for handle in self._live())

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 30))
    def poison(self, data, num_tokens):
        """From now on the worker refuses a request's steps, once it has `num_tokens` tokens."""
        self.driver.poisoned[data.draw(st.sampled_from(sorted(self.requests)))] = num_tokens

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), nth=st.integers(1, 30))
    def make_deadly(self, data, nth):
        """From now on the worker dies of a step that computes this token of a request."""
        self.driver.deadly[data.draw(st.sampled_from(sorted(self.requests)))] = nth

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), position=st.integers(0, 40))
    def make_fail(self, data, position):
        """Logits of a request are not finite from this position on."""
        handle = data.draw(st.sampled_from(sorted(self.requests)))
        started = {
            group.request.key.handle for group in self.driver.scheduler.groups() if group.timeline.started is not None
        }
        # Logits that were computed before stay as they are.
        if handle in self._live() - started:
            self.driver.failing.setdefault(handle, position)

    @rule()
    def look_at_cache(self):
        self.mirror.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 30))
    def make_constraint_fail(self, data, num_tokens):
        """From now on the worker finds that a request's constraint fails, once it has `num_tokens` tokens."""
        handle = data.draw(st.sampled_from(sorted(self.requests)))
        if self.requests[handle].has_constraint:
            self.driver.refusing[handle] = num_tokens

    @invariant()
    def holds(self):
        if not hasattr(self, "driver"):
            return
        self.driver.check()
        if self.is_cache_watched:
            self.mirror.check()
        for (handle, index), expected in self.expected.items():
            if handle in self.requests:
                output = self.driver.samples[handle, index]
                assert output == expected[: len(output)]

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        try:
            self._run_to_the_end()
        finally:
            self.patch.undo()

    def _run_to_the_end(self):
        for offer in self.offers:
            self.driver.scheduler.abort(offer.key)
        self.driver.unloadable.clear()
        self.driver.run_until_idle()
        self.mirror.check()
        for (handle, index), expected in self.expected.items():
            if handle in self.driver.finished:
                assert self.driver.samples[handle, index] == expected
        driver = self.driver
        faults = {*driver.poisoned, *driver.deadly, *driver.failing, *driver.refusing}
        assert {each for each in driver.failed if each < _FIRST_OFFER} <= faults | self.killed
        assert self.driver.finished == self.requests.keys() - self.driver.failed
        scheduler = self.driver.scheduler
        blocks = scheduler.batch.blocks
        assert blocks.pool.num_used == scheduler.pins.num_pinned
        scheduler.expire_pins(self.driver.clock + 100)
        assert blocks.pool.num_used == blocks.host.pool.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(few_examples(), stateful_step_count=60, deadline=None)
