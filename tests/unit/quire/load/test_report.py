"""Records and reports: every figure computed by hand."""

import json
import math

import numpy as np
import pytest

from quire.load import Report, RequestRecord, Slo, make_report


def make_record(
    index: int = 0,
    arrival_s: float = 0.0,
    times: tuple[float, ...] = (1.0, 2.0),
    tokens: tuple[int, ...] | None = None,
    sequences: tuple[int, ...] | None = None,
    end_s: float | None = None,
    error: str | None = None,
    **fields: int,
) -> RequestRecord:
    return RequestRecord(
        index,
        arrival_s,
        sent_s=arrival_s,
        end_s=times[-1] if end_s is None else end_s,
        chunk_times_s=np.array(times, np.float64),
        chunk_tokens=np.array(tokens or (1,) * len(times), np.int32),
        chunk_sequences=np.array(sequences or (0,) * len(times), np.int32),
        error=error,
        **fields,
    )


def test_latencies_of_one_sequence() -> None:
    record = make_record(arrival_s=1.0, times=(1.5, 2.0, 3.0), tokens=(1, 2, 2), end_s=3.5)
    assert record.ttft_s == 0.5
    assert record.latency_s == 2.5
    assert record.output_tokens == record.output_len == 5
    assert record.normalized_latency_s == 0.5
    assert record.tpot_s == pytest.approx(1.5 / 4)
    assert record.gaps_s().tolist() == [0.5, 1.0]
    # Tokens that come at once have no time per token.
    beams = make_record(times=(3.0, 3.0), tokens=(8, 8), sequences=(0, 1))
    assert (beams.ttft_s, beams.tpot_s, beams.gaps_s().tolist()) == (3.0, None, [])


def test_samples_are_sequences_of_their_own_and_the_longest_one_is_the_output() -> None:
    record = make_record(times=(1.0, 1.0, 2.0, 2.5, 4.0), sequences=(0, 1, 1, 0, 1))
    assert record.output_tokens == 5
    assert record.output_len == 3
    assert record.tpot_s == pytest.approx((4.0 - 1.0) / 2)
    assert sorted(record.gaps_s()) == [1.0, 1.5, 2.0]
    assert record.normalized_latency_s == pytest.approx(4.0 / 3)


def test_throughput_and_goodput_are_counted_by_hand() -> None:
    records = [
        make_record(0, 0.0, times=(0.1, 0.2, 0.3), prompt_tokens=10, cached_tokens=4, preemptions=1),
        make_record(1, 1.0, times=(2.0, 2.1), prompt_tokens=20, cached_tokens=0, preemptions=0),  # late first token
        make_record(2, 2.0, times=(2.1, 4.0), prompt_tokens=30, cached_tokens=0, preemptions=0),  # slow afterwards
        make_record(3, 2.0, times=(2.1,), end_s=2.5, error="UNAVAILABLE"),
    ]
    report = make_report(records, request_rate=2.0, slo=Slo(ttft=0.5, tpot=0.2), client_cpu_s=1.0)
    assert report.duration_s == 4.0
    assert (report.requests, report.completed, report.errors) == (4, 3, {"UNAVAILABLE": 1})
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens, report.preemptions) == (60, 7, 4, 1)
    assert report.requests_per_s == 0.75
    assert report.output_tokens_per_s == 1.75
    assert report.total_tokens_per_s == 67 / 4
    assert report.goodput == 0.25
    assert report.slo_share == 0.25
    assert report.client_cpu_share == 0.25
    assert report.ttft is not None
    assert (report.ttft.count, report.ttft.p50, report.ttft.maximum) == (3, pytest.approx(0.1), pytest.approx(1.0))
    assert report.ttft.mean == pytest.approx((0.1 + 1.0 + 0.1) / 3)
    assert report.ttft.p90 == pytest.approx(0.1 + 0.8 * 0.9)
    assert report.itl is not None
    assert report.itl.count == 4


def test_what_no_server_says_is_not_known_and_errors_alone_have_a_report() -> None:
    report = make_report([make_record()], request_rate=math.inf)
    assert (report.cached_tokens, report.preemptions, report.goodput, report.client_cpu_share) == (None,) * 4
    report = make_report([RequestRecord(0, 0.0, 0.0, 0.0, error="UNAVAILABLE")], request_rate=1.0, slo=Slo(e2e=1))
    assert (report.completed, report.ttft, report.itl, report.goodput, report.requests_per_s) == (0, None, None, 0, 0)
    with pytest.raises(ValueError, match="there is no request to report"):
        make_report([], request_rate=1.0)


def test_a_report_comes_back_from_json() -> None:
    records = [make_record(), make_record(1, 0.5, error="TIMEOUT")]
    report = make_report(records, request_rate=math.inf, max_concurrency=4, slo=Slo(ttft=0.5))
    text = json.dumps(report.as_json(), allow_nan=False)
    assert Report.from_json(json.loads(text)) == report


def test_limits_are_read_with_their_units_or_refused() -> None:
    assert Slo.parse("ttft=500ms,tpot=50ms,e2e=2.5s") == Slo(ttft=0.5, tpot=0.05, e2e=2.5)
    assert str(Slo.parse("ttft=0.5s, normalized=50ms")) == "ttft=500ms,normalized=50ms"
    for text in ("", "ttft=500", "ttft=-1ms", "latency=1s", "ttft=1s,ttft=2s"):
        with pytest.raises(ValueError, match=r"is no limit; expected NAME=NUMBERms|has two limits"):
            Slo.parse(text)
    assert Slo(itl=1.0).is_met(make_record(times=(0.5, 1.5)))
    assert not Slo(itl=1.0).is_met(make_record(times=(0.5, 0.6, 1.7)))
