"""Runs a torture: answers to single requests, to many at once, under faults, and after them."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from urllib.parse import urlsplit

import httpx

from quire_torture.answers import Answer
from quire_torture.client import Client, FailedError, Progress, Server
from quire_torture.faults import NOTHING, Fault, NothingHappenedError, Place
from quire_torture.link import Link
from quire_torture.oracle import WRONG, Finding, Oracle, Verdict, drift_of, same_answer
from quire_torture.processes import listener_of
from quire_torture.shrinking import fewest_of_runs
from quire_torture.traffic import COMPLETIONS, KINDS, Call, Limits, Question, draw_calls, draw_questions

_PROBE_EVERY_S, _PROBE_TIMEOUT_S, _FIRST_ANSWER_S = 0.25, 10.0, 120.0
_MAX_TRIES = 3
"""Tries of a fault that does not happen, for example because its process is just starting."""
_PAUSE_S, _LATENCY_S = 0.1, 1.0
"""A shorter time between two outputs of a caller is no pause, and the time until a fault has its effect."""


class CannotTortureError(Exception):
    """The server cannot be tortured, for example because it does not answer; the message is one line."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A torture of one server.

    Attributes:
        url: With or without /v1.
        num_streams: Callers at once.
        max_s: Maximum seconds of each run.
        hung_s: Seconds of service without output after which a request hangs.
        model: None is the only one that the server has.
        num_requests: Requests of the run with faults, and of the equal one without.
        num_questions: Different requests among them.
        faults: Each happens `times` times, in an order drawn by the seed.
        rate: Maximum requests a second.
        root: Process whose tree is the server; None is found by the port.
    """

    url: str
    seed: int
    num_streams: int
    max_s: float
    hung_s: float
    model: str | None = None
    num_requests: int = 0
    num_questions: int = 0
    faults: tuple[Fault, ...] = ()
    times: int = 0
    rate: float = 1e6
    num_retries: int = 0
    limits: Limits = field(default_factory=Limits)
    root: int | None = None


Step = Call | Fault
"""A part of a story: a call that begins, or a fault that happens while earlier calls run."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A defect of the answer to a call, which began at this time of the monotonic clock."""

    call: Call
    finding: Finding
    began: float


@dataclass(slots=True)
class Struck:
    """A fault that has happened.

    Attributes:
        at: When it began, in seconds of the monotonic clock.
        acted: When it had happened.
        pauses_s: The longest pause of each caller's output that began before the next fault, in seconds.
        served_s: Seconds from then until a request succeeded again; None if none did.
    """

    text: str
    at: float
    acted: float = 0.0
    proof: str = ""
    pauses_s: dict[int, float] = field(default_factory=dict[int, float])
    served_s: float | None = None


@dataclass(slots=True)
class Report:
    """The findings of one run.

    Attributes:
        num_left: Calls whose caller went away; their beginnings are compared.
        errors: By kind.
        missed: Faults that could not be proven, with the reason.
        drifts: Differences of log probabilities of equal texts.
        firsts_s: Seconds to the first output of each answer.
        steps: All that was done, in order.
    """

    num_calls: int = 0
    num_equal: int = 0
    num_left: int = 0
    num_retries: int = 0
    wrongs: list[Wrong] = field(default_factory=list[Wrong])
    errors: Counter[str] = field(default_factory=Counter[str])
    struck: list[Struck] = field(default_factory=list[Struck])
    missed: Counter[str] = field(default_factory=Counter[str])
    drifts: list[float] = field(default_factory=list[float])
    firsts_s: list[float] = field(default_factory=list[float])
    steps: list[Step] = field(default_factory=list[Step])
    seconds: float = 0.0

    def count(self, *verdicts: Verdict) -> int:
        """Calls with one of these verdicts."""
        return len({each.call.number for each in self.wrongs if each.finding.verdict in verdicts})


class Torture:
    """A server under torture. Use `started`, or `prepared` for a server that is reached in another way.

    Attributes:
        unsupported: Kinds of requests that the server refuses before any fault, and its reasons.
        undisturbed: The run in which each request is sent by itself.
    """

    def __init__(
        self, plan: Plan, place: Place, server: Server, say: Callable[[str], None], questions: Sequence[Question] = ()
    ) -> None:
        self.plan = plan
        self.place = Place(place.port, place.link, self._make_one_leave, place.root)
        self.questions = questions
        self.unsupported: dict[str, str] = {}
        self.undisturbed = Report()
        self.oracle = Oracle({}, {})
        self._server = server
        self._say = say
        self._open: set[Progress] = set()
        self._last_output: dict[int, float] = {}
        self._struck: list[Struck] = []
        self._striking: asyncio.Task[None] | None = None
        self._served_s = 0.0
        self._last_served = 0.0
        """When the last request that succeeded began."""
        self._ends_at = math.inf
        """When requests without output count as hung, even if the server serves no others."""

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, plan: Plan, say: Callable[[str], None]) -> AsyncIterator["Torture"]:
        """Finds the server, the kinds of requests that it supports, and its answers to single requests.
        Raises CannotTortureError."""
        parts = urlsplit(plan.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        needs_process = any(fault.needs_process for fault in plan.faults)
        if needs_process and plan.root is None and listener_of(port) is None:
            raise CannotTortureError(f"no process of this user listens at port {port}; give --process-tree")
        timeout = httpx.Timeout(None, connect=_PROBE_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.num_streams)
        async with (
            Link(lambda: f"{parts.hostname}:{port}").listening() as link,
            httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as http,
        ):
            # A certificate is for the name of the server, so TLS does not go through the link.
            through = f"http://{link.address}{parts.path}" if parts.scheme == "http" else plan.url
            base_url = through.rstrip("/").removesuffix("/v1")
            model = plan.model or await _only_model(http, base_url, plan)
            plan, client = replace(plan, model=model), Client(http, base_url, model, plan.num_retries)
            torture = cls(plan, Place(port, link, lambda: False, plan.root), client, say)
            await torture._draw_questions()
            async with torture.prepared():
                yield torture

    @contextlib.asynccontextmanager
    async def prepared(self) -> AsyncIterator[None]:
        """Finds the answers to single requests, and watches the service until the end. Raises CannotTortureError."""
        await self._ask_undisturbed()
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _draw_questions(self) -> None:
        """Questions of the kinds that the server supports."""
        plan, kinds = self.plan, list[str]()
        for kind in KINDS:
            try:
                await self._ask(draw_questions(plan.seed, 1, plan.limits, [kind])[0])
                kinds.append(kind)
            except FailedError as error:
                self.unsupported[kind] = f"{error} {error.detail}".strip()
        if not kinds:
            raise CannotTortureError(f"{plan.url} answers no request: {next(iter(self.unsupported.values()))}")
        self.questions = draw_questions(plan.seed, plan.num_questions, plan.limits, kinds)

    async def _ask_undisturbed(self) -> None:
        """Asks each question twice, one at a time: what differs then is compared no further."""
        canaries = {each.number: each.canary for each in self.questions}
        expected: dict[int, Answer | None] = {}
        drift, undisturbed = 0.0, Oracle(dict.fromkeys(canaries), canaries)
        for question in self.questions:
            try:
                first, second = [await self._ask(question) for _ in range(2)]
            except FailedError as error:
                what = f"{question.kind}: {error} {error.detail}"
                raise CannotTortureError(f"a request fails while no other runs: {what}") from error
            expected[question.number] = first if same_answer(first, second) else None
            drift = max(drift, drift_of(first, second)) if same_answer(first, second) else drift
            call = Call(-1 - question.number, question)
            self.undisturbed.wrongs += [Wrong(call, each, 0.0) for each in undisturbed.judge(question, first)]
        self.undisturbed.num_calls = 2 * len(self.questions)
        self.oracle = Oracle(expected, canaries, drift)

    @property
    def _key(self) -> str | None:
        return next(iter(self.plan.limits.api_keys), None)

    async def _ask(self, question: Question) -> Answer:
        progress = Progress(Call(-1, question, self._key))
        try:
            async with asyncio.timeout(_FIRST_ANSWER_S):
                answer = await self._server.send(progress)
        except TimeoutError:
            raise FailedError(f"no answer within {_FIRST_ANSWER_S:.0f} s") from None
        if progress.first_s is not None:
            self.undisturbed.firsts_s.append(progress.first_s)
        return answer

    def story(self, *, with_faults: bool) -> Iterator[Step]:
        """The steps of a run: at least `num_requests` calls, and more until all faults are over. A fault comes once
        enough calls have begun and the server serves again after the one before. Without faults nothing happens in
        their places, and the calls are the same."""
        plan = self.plan
        faults = [fault for fault in plan.faults for _ in range(plan.times)]
        Random(f"order {plan.seed}").shuffle(faults)
        spacing, since = plan.num_requests / (len(faults) + 1), 0
        for call in draw_calls(plan.seed, self.questions, plan.limits):
            if faults and since >= spacing and self._is_calm:
                fault = faults.pop()
                yield fault if with_faults else NOTHING
                since = 0
            if call.number >= plan.num_requests and not faults and self._is_calm:
                return
            since += 1
            yield call

    def each_question(self) -> Iterator[Step]:
        """Each question once, without haste, to find out what the torture has left behind."""
        return (Call(number, question, self._key) for number, question in enumerate(self.questions))

    @property
    def _is_calm(self) -> bool:
        """Whether the last fault is over: the server has served a request since."""
        return self._striking is None or self._striking.done()

    async def _until_calm(self) -> None:
        if self._striking is not None:
            await self._striking

    async def run(self, story: Iterable[Step], num_streams: int | None = None, report: Report | None = None) -> Report:
        """Takes the steps of a story in their order. A fault waits until the one before is over. `report` grows
        meanwhile, if it is given."""
        report, began = report or Report(), time.monotonic()
        self._struck, self._last_output, self._striking = report.struck, {}, None
        self._ends_at = began + self.plan.max_s + self.plan.hung_s
        turn, steps, rng = asyncio.Lock(), iter(story), Random(f"faults {self.plan.seed}")

        async def next_call() -> Call | None:
            async with turn:
                for step in steps:
                    if time.monotonic() - began >= self.plan.max_s:
                        break
                    report.steps.append(step)
                    if isinstance(step, Call):
                        report.num_calls += 1
                        await asyncio.sleep(max(0.0, began + report.num_calls / self.plan.rate - time.monotonic()))
                        return step
                    await self._until_calm()
                    self._striking = asyncio.create_task(self.strike(step, report, rng))
                return None

        async def call_on(caller: int) -> None:
            while (call := await next_call()) is not None:
                await self._one(Progress(call, caller, self._note_output), report)

        async with asyncio.TaskGroup() as group:
            for caller in range(num_streams or self.plan.num_streams):
                group.create_task(call_on(caller))
        await self._until_calm()
        report.seconds = time.monotonic() - began
        return report

    async def _one(self, progress: Progress, report: Report) -> None:
        """Sends one call, and judges its answer. After a failure it waits until the server serves, so that one fault
        does not fail all calls that follow."""
        question, findings, answer = progress.call.question, list[Finding](), None
        self._open.add(progress)
        self._last_output.setdefault(progress.caller, progress.began)
        try:
            answer = await self._within(progress)
        except FailedError as error:
            report.errors[str(error)] += 1
            findings.append(Finding(Verdict.ERROR, f"{error} {error.detail}".strip()))
        except TimeoutError as error:
            findings.append(Finding(Verdict.HUNG, str(error)))
        finally:
            self._open.discard(progress)
        has_failed = answer is None
        if answer is None and progress.reading is not None:
            answer = progress.reading.answer()
        if answer is not None:
            is_partial = has_failed or progress.has_left
            findings += self.oracle.judge(question, answer, is_partial=is_partial)
            expected = self.oracle.expected[question.number]
            if not is_partial and expected is not None and same_answer(expected, answer):
                report.drifts.append(drift_of(expected, answer))
        report.num_retries += progress.num_retries
        report.firsts_s += [] if progress.first_s is None else [progress.first_s]
        report.num_left += progress.has_left
        report.num_equal += not findings and not progress.has_left
        report.wrongs += [Wrong(progress.call, each, progress.began) for each in findings]
        if has_failed:
            await self._until_served(time.monotonic(), self.plan.hung_s)
        else:
            self._last_output.pop(progress.caller)

    async def _within(self, progress: Progress) -> Answer:
        """Raises TimeoutError if nothing comes for `hung_s` seconds in which the server serves others, or until that
        long after the end of the run."""
        task = asyncio.create_task(self._server.send(progress))
        num_seen, since = -1, 0.0
        try:
            while not (await asyncio.wait([task], timeout=0.5))[0]:
                if progress.num_events != num_seen:
                    num_seen, since = progress.num_events, self._served_s
                elif self._served_s - since > self.plan.hung_s:
                    raise TimeoutError(f"no output for {self.plan.hung_s:.0f} s of service")
                elif time.monotonic() > self._ends_at:
                    raise TimeoutError(f"no output {self.plan.hung_s:.0f} s after the end of the run")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _note_output(self, progress: Progress) -> None:
        now = time.monotonic()
        last = self._last_output.get(progress.caller, now)
        if progress.caller in self._last_output:
            self._last_output[progress.caller] = now
        # The last fault before the pause: a later one may have happened before its end.
        struck = next((each for each in reversed(self._struck) if each.at <= last + _LATENCY_S), None)
        if struck is not None and now - last >= _PAUSE_S:
            struck.pauses_s[progress.caller] = max(now - last, struck.pauses_s.get(progress.caller, 0.0))

    def _make_one_leave(self) -> bool:
        """Makes the caller go away whose stream has begun last."""
        for progress in sorted(self._open, key=lambda each: -each.began):
            if progress.is_open:
                progress.has_left = True
                return True
        return False

    async def strike(self, fault: Fault, report: Report, rng: Random) -> None:
        """Lets a fault happen, and waits until the server serves again."""
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        for tries_left in reversed(range(_MAX_TRIES)):
            struck = Struck(fault.text, time.monotonic())
            report.struck.append(struck)
            try:
                struck.proof = await fault.happen(self.place, rng)
            except (NothingHappenedError, OSError) as error:
                report.struck.remove(struck)
                if not tries_left:
                    report.missed[f"{fault.text}: {error}"] += 1
                await asyncio.sleep(1.0)
                continue
            struck.acted = time.monotonic()
            if await self._until_served(struck.acted, self._ends_at - struck.acted):
                struck.served_s = time.monotonic() - struck.acted
            if fault is not NOTHING:
                served = (
                    "not served again" if struck.served_s is None else f"served again after {struck.served_s:.1f} s"
                )
                self._say(f"{fault.text}: {struck.proof}; {served}")
            return

    async def _until_served(self, after: float, timeout_s: float) -> bool:
        """Whether a request that begins after this moment succeeds within `timeout_s`."""
        ends_at = time.monotonic() + timeout_s
        while self._last_served < after:
            if time.monotonic() > ends_at:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _watch(self) -> None:
        """Sends requests of one token while the server is under torture, and counts the seconds of service."""
        call = Call(-1, min(self.questions, key=lambda each: (each.is_stream, each.path != COMPLETIONS)), self._key)
        last = time.monotonic()
        while True:
            began = time.monotonic()
            if await self._server.serves(call, _PROBE_TIMEOUT_S):
                self._last_served = began
                self._served_s += time.monotonic() - last
            last = time.monotonic()
            await asyncio.sleep(_PROBE_EVERY_S)

    async def shrunk(self, report: Report, limit_s: float) -> tuple[tuple[Step, ...], list[Wrong]] | None:
        """The fewest steps found that still give a wrong answer, and what it then was; None if a second run of the
        whole story has none."""
        wrong = [each.call for each in report.wrongs if each.finding.verdict in WRONG]
        last = max(report.steps.index(each) for each in wrong)
        ends_at, found = time.monotonic() + limit_s, list[Wrong]()

        async def fails(steps: tuple[Step, ...]) -> bool:
            nonlocal found
            if not steps or time.monotonic() > ends_at:
                return False
            again = await self.run(steps)
            seen = [each for each in again.wrongs if each.finding.verdict in WRONG]
            found = seen or found
            return bool(seen)

        steps = tuple(report.steps[: last + 1])
        # Mostly the last calls are enough.
        for count in (1, 2, self.plan.num_streams, 4 * self.plan.num_streams):
            if count < len(steps) and await fails(steps[-count:]):
                steps = steps[-count:]
                break
        else:
            if not await fails(steps):
                return None
        return await fewest_of_runs(steps, fails), found


async def _only_model(http: httpx.AsyncClient, base_url: str, plan: Plan) -> str:
    headers = {"authorization": f"Bearer {plan.limits.api_keys[0]}"} if plan.limits.api_keys else {}
    try:
        answer = await http.get(f"{base_url}/v1/models", headers=headers, timeout=_PROBE_TIMEOUT_S)
        names = [str(model["id"]) for model in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise CannotTortureError(f"{plan.url} does not list its models: {type(error).__name__} {error}") from error
    if len(names) != 1:
        raise CannotTortureError(f"--model is missing; {plan.url} serves {', '.join(names) or 'none'}")
    return names[0]
