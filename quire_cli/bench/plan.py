"""Plans the runs that the flags of `quire bench` describe: requests with their times of arrival."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from quire.load import (
    SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT,
    Arrivals,
    Constant,
    Dataset,
    LoadRequest,
    alpaca,
    chat,
    describe,
    first_until,
    fixed,
    make_arrivals,
    read_requests,
    recorded_times,
    shared_prefix,
    sharegpt,
    with_arrivals,
    with_other_tokens,
)
from quire.runtime.settings import ConfigurationError
from quire_cli.bench.flags import (
    DATASETS,
    DEFAULT_MAX_MODEL_LEN,
    DEFAULT_NUM_REQUESTS,
    DEFAULT_VOCAB_SIZE,
    TRACE,
    LoadFlags,
)

_SHIFT = 37
"""Added to token ids in each run, so that earlier runs have cached none of its prompts."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run.

    Attributes:
        rate: Requests a second; infinite if all arrive at once, or when there is a slot.
        is_closed: Requests arrive when there is a slot for them.
        duration_s: Nothing is sent after it.
        num_requests: None if the duration limits the run.
    """

    label: str
    rate: float
    max_concurrency: int | None
    is_closed: bool
    duration_s: float | None
    num_requests: int | None
    requests: Iterator[LoadRequest]


def read_file(flags: LoadFlags) -> list[LoadRequest] | None:
    """The requests of the dataset's file; None if the dataset is a name. Raises ConfigurationError."""
    if flags.dataset in DATASETS:
        if TRACE in flags.request_rate:
            raise ConfigurationError(f"--request-rate: {TRACE} takes a file with arrival_s as --dataset")
        return None
    path = Path(flags.dataset)
    if not path.suffix and not path.exists():
        known = ", ".join(DATASETS)
        raise ConfigurationError(f'--dataset: "{path}" is not known; expected {known}, or a file of JSON lines')
    try:
        requests = read_requests(path, flags.output_len)
    except OSError as error:
        raise ConfigurationError(f"--dataset: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"--dataset: {error}") from None
    if TRACE in flags.request_rate and recorded_times(requests) is None:
        raise ConfigurationError(f"--request-rate: {TRACE} takes a file with arrival_s; {path} has none")
    if (flags.num_requests or 0) > len(requests):
        raise ConfigurationError(f"--num-requests is {flags.num_requests:,}; {path} has {len(requests):,} requests")
    return requests


class Load:
    """The requests that the flags describe. Raises ConfigurationError if there are none.

    Args:
        file: The result of `read_file`.
        vocab_size: The model's; the flags' own value wins, and there is a default. The same holds for `max_model_len`.
    """

    def __init__(
        self, flags: LoadFlags, file: list[LoadRequest] | None, vocab_size: int | None, max_model_len: int | None
    ) -> None:
        self._flags = flags
        self.vocab_size = flags.vocab_size or vocab_size or DEFAULT_VOCAB_SIZE
        self.max_model_len = flags.max_model_len or max_model_len or DEFAULT_MAX_MODEL_LEN
        self._file = file
        self._trace = None if file is None else recorded_times(file)
        try:
            self._dataset = self._open_dataset() if file is None else None
        except ValueError as error:
            raise ConfigurationError(f"--dataset: {error}") from None

    def runs(self) -> Iterator[PlannedRun]:
        """The runs, one for each pair of a rate and a limit of concurrency."""
        rates = self._flags.request_rate or (math.inf if self._trace is None else TRACE,)
        limits = self._flags.max_concurrency or (None,)
        pairs = [(rate, limit) for rate in rates for limit in limits]
        for number, (rate, limit) in enumerate(pairs, start=1):
            yield self._run(number, rate, limit)

    def warm_up(self, count: int) -> list[LoadRequest]:
        """Returns `count` requests like the first ones, each by itself."""
        first = [self._decoded(replace(request, turn=0, arrival_s=None)) for request in self._first_requests(count)]
        return self._moved(first, self.vocab_size // 2)

    def describe(self) -> dict[str, object]:
        """Facts of the planned requests of a run; with a duration, of the default number of requests."""
        sample = self._first_requests(self._flags.num_requests or DEFAULT_NUM_REQUESTS)
        sizes = {"vocab_size": self.vocab_size, "max_model_len": self.max_model_len}
        return {"dataset": self._flags.dataset, "seed": self._flags.seed, **sizes, **describe(sample)}

    def _open_dataset(self) -> Dataset:
        flags, sizes, scale = self._flags, (self.max_model_len, self.vocab_size), self._flags.length_scale or 1.0
        match flags.dataset:
            case "sharegpt":
                return sharegpt(*sizes, scale)
            case "alpaca":
                return alpaca(*sizes, scale)
            case "fixed":
                lengths = (flags.prompt_len or 128, flags.output_len or 128)
                if sum(lengths) > self.max_model_len:
                    raise ValueError(
                        f"prompts of {lengths[0]:,} tokens and outputs of {lengths[1]:,} do not fit the model, which "
                        f"takes {self.max_model_len:,} together; set --prompt-len and --output-len"
                    )
                return fixed(*lengths, self.vocab_size)
            case "shared-prefix":
                prompt = SHAREGPT_PROMPT if flags.prompt_len is None else Constant(flags.prompt_len)
                output = SHAREGPT_OUTPUT if flags.output_len is None else Constant(flags.output_len)
                return shared_prefix(flags.prefix_len or 256, prompt, output, *sizes, flags.num_prefixes or 1)
            case _:
                turns, delay_s = flags.mean_turns or 3.5, flags.turn_delay or 0.0
                longest = flags.max_prompt_len
                return chat(*sizes, max_prompt_len=longest, mean_turns=turns, delay_s=delay_s, scale=scale)

    def _run(self, number: int, rate: float | str, limit: int | None) -> PlannedRun:
        flags = self._flags
        arrivals = self._arrivals(rate)
        is_closed = math.isinf(arrivals.rate) and limit is not None
        # Times within a duration count conversations. The last ones may be unfinished when it ends.
        requests = self._all() if flags.duration is not None else iter(self._first_requests(flags.num_requests))
        if is_closed:
            load = requests
        elif flags.duration is not None:
            times = first_until(arrivals, flags.duration, flags.seed)
            load = iter(self._arriving(requests, len(times), arrivals))
        else:
            load = iter(with_arrivals(requests, arrivals, flags.seed))
        shown = TRACE if rate == TRACE else f"{rate:g}/s" if rate != math.inf else "inf"
        return PlannedRun(
            label=shown if limit is None else f"{shown}, {limit} at once",
            rate=arrivals.rate,
            max_concurrency=limit,
            is_closed=is_closed,
            duration_s=flags.duration,
            num_requests=self._num_requests(),
            requests=(self._prepared(request, number) for request in load),
        )

    def _arriving(self, requests: Iterator[LoadRequest], count: int, arrivals: Arrivals) -> list[LoadRequest]:
        """The first `count` conversations, with times."""
        load: list[LoadRequest] = []
        for request in requests:
            count -= request.turn == 0
            if count < 0:
                break
            load.append(request)
        return with_arrivals(load, arrivals, self._flags.seed)

    def _arrivals(self, rate: float | str) -> Arrivals:
        if isinstance(rate, float):
            return make_arrivals(rate, self._flags.burstiness)
        assert self._trace is not None, "read_file has checked it"
        return self._trace

    def _prepared(self, request: LoadRequest, number: int) -> LoadRequest:
        (moved,) = self._moved([request], _SHIFT * (number - 1))
        return self._decoded(moved)

    def _decoded(self, request: LoadRequest) -> LoadRequest:
        return replace(request, n=self._flags.n, beam_width=self._flags.beam_width)

    def _moved(self, requests: list[LoadRequest], shift: int) -> list[LoadRequest]:
        """Replaces token ids by others, except in requests of a file, whose tokens have a meaning."""
        return requests if self._file is not None else with_other_tokens(requests, shift, self.vocab_size)

    def _num_requests(self) -> int | None:
        if self._flags.duration is not None:
            return None
        if self._flags.num_requests is not None:
            return self._flags.num_requests
        return DEFAULT_NUM_REQUESTS if self._file is None else len(self._file)

    def _first_requests(self, count: int | None) -> list[LoadRequest]:
        """The first `count` requests; None for all of a file, or for the default number."""
        if count is None:
            count = DEFAULT_NUM_REQUESTS if self._file is None else len(self._file)
        return list(islice(self._all(), count))

    def _all(self) -> Iterator[LoadRequest]:
        if self._file is not None:
            return iter(self._file)
        assert self._dataset is not None, "there is a file or a dataset"
        return self._dataset.requests(self._flags.seed)
