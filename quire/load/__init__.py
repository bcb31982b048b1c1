"""Loads of requests and records of their results: shared by `quire bench`, which sends them, and simulators.

    load = take(sharegpt(max_model_len=2048, vocab_size=50272), 200, seed=5)
    load = with_arrivals(load, Poisson(rate=2.0), seed=5)
    records = ...                                    # one RequestRecord each, of a server or of a simulator
    report = make_report(records, request_rate=2.0, slo=Slo.parse("ttft=500ms,tpot=50ms"))

    LoadResult("simulate", "roofline", facts, (Run.of(report, records),)).write(path)

`quire.load.plots` draws results. Everything is seeded: the same arguments give the same requests, to the byte. Times
are seconds since the run began.
"""

from quire.load.arrivals import Arrivals, AtOnce, Gamma, Poisson, Trace, first_until, make_arrivals
from quire.load.datasets import (
    ALPACA_OUTPUT,
    ALPACA_PROMPT,
    SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT,
    Chat,
    Constant,
    Dataset,
    Independent,
    Length,
    Lognormal,
    alpaca,
    chat,
    fixed,
    shared_prefix,
    sharegpt,
    take,
)
from quire.load.files import read_requests, recorded_times
from quire.load.records import RequestRecord
from quire.load.report import Report, Slo, Statistics, make_report
from quire.load.requests import (
    LoadRequest,
    Message,
    arriving_at,
    conversations,
    describe,
    with_arrivals,
    with_decoding,
    with_other_tokens,
)
from quire.load.results import LoadResult, Run

__all__ = [
    "ALPACA_OUTPUT",
    "ALPACA_PROMPT",
    "SHAREGPT_OUTPUT",
    "SHAREGPT_PROMPT",
    "Arrivals",
    "AtOnce",
    "Chat",
    "Constant",
    "Dataset",
    "Gamma",
    "Independent",
    "Length",
    "LoadRequest",
    "LoadResult",
    "Lognormal",
    "Message",
    "Poisson",
    "Report",
    "RequestRecord",
    "Run",
    "Slo",
    "Statistics",
    "Trace",
    "alpaca",
    "arriving_at",
    "chat",
    "conversations",
    "describe",
    "first_until",
    "fixed",
    "make_arrivals",
    "make_report",
    "read_requests",
    "recorded_times",
    "shared_prefix",
    "sharegpt",
    "take",
    "with_arrivals",
    "with_decoding",
    "with_other_tokens",
]
