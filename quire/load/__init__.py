"""Loads of requests and records of their results: shared by `quire bench`, which sends them, and simulators.

    load = take(sharegpt(max_model_len=2048, vocab_size=50272), 200, seed=5)
    load = with_arrivals(load, Poisson(rate=2.0), seed=5)
    records = ...                                    # one RequestRecord each, of a server or of a simulator
    report = make_report(records, request_rate=2.0, slo=Slo.parse("ttft=500ms,tpot=50ms"))

    LoadResult("simulate", "roofline", facts, (Run.of(report, records),)).write(path)

`quire.load.plots` draws results. Everything is seeded: the same arguments give the same requests, to the byte. Times
are seconds since the run began.
"""

# ruff: noqa: I001  (one import for each module)

from quire.load.arrivals import (
    Arrivals as Arrivals,
    AtOnce as AtOnce,
    Gamma as Gamma,
    Poisson as Poisson,
    Trace as Trace,
    first_until as first_until,
    make_arrivals as make_arrivals,
)
from quire.load.datasets import (
    ALPACA_OUTPUT as ALPACA_OUTPUT,
    ALPACA_PROMPT as ALPACA_PROMPT,
    SHAREGPT_OUTPUT as SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT as SHAREGPT_PROMPT,
    Chat as Chat,
    Constant as Constant,
    Dataset as Dataset,
    Independent as Independent,
    Length as Length,
    Lognormal as Lognormal,
    alpaca as alpaca,
    chat as chat,
    fixed as fixed,
    shared_prefix as shared_prefix,
    sharegpt as sharegpt,
    take as take,
)
from quire.load.files import read_requests as read_requests, recorded_times as recorded_times
from quire.load.records import RequestRecord as RequestRecord
from quire.load.report import Report as Report, Slo as Slo, Statistics as Statistics, make_report as make_report
from quire.load.requests import (
    LoadRequest as LoadRequest,
    Message as Message,
    arriving_at as arriving_at,
    conversations as conversations,
    describe as describe,
    with_arrivals as with_arrivals,
    with_decoding as with_decoding,
    with_other_tokens as with_other_tokens,
)
from quire.load.results import LoadResult as LoadResult, Run as Run
