"""Files of requests, files of results, and pictures."""

import json
import math
from pathlib import Path

import pytest

from quire.load import LoadResult, Message, RequestRecord, Run, Slo, make_report, read_requests, recorded_times
from quire.load.plots import plot
from quire.load.results import replace_file
from tests.unit.quire.load.test_report import make_record


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_file_has_texts_token_ids_and_conversations(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    path = written(tmp_path, {"prompt": "Once", "output_len": 7}, "", {"prompt": [1, 2, 3]}, {"messages": talk}, "")
    text, ids, messages = read_requests(path, default_output_len=5)
    assert (text.prompt, text.output_len) == ("Once", 7)
    assert (ids.token_ids.tolist(), ids.output_len) == ([1, 2, 3], 5)
    assert messages.prompt == (Message("system", "Be short."), Message("user", "Hi"))
    assert [request.index for request in (text, ids, messages)] == [0, 1, 2]
    assert recorded_times([text, ids]) is None
    with pytest.raises(ValueError, match="request 1 has a text as its prompt; token ids are needed here"):
        _ = text.token_ids
    trace = recorded_times(read_requests(written(tmp_path, *({"prompt": "a", "arrival_s": at} for at in (3, 3.5, 9)))))
    assert trace is not None
    assert trace.times(3, seed=0).tolist() == [0.0, 0.5, 6.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2, is no JSON: Expecting property name"),
        ([1], "line 2: is a list, must be an object with prompt or messages"),
        ({"prompt": "a", "messages": []}, "line 2: has both prompt and messages"),
        ({"prompt": "a", "max_tokens": 3}, "line 2: has 'max_tokens'; known are prompt, messages, output_len"),
        ({"prompt": [1, -1]}, r"line 2: prompt is \[1, -1\], must be"),
        ({"messages": [{"role": "user"}]}, "line 2: a message is {'role': 'user'}, must be an object with"),
        ({"prompt": "a", "output_len": 0}, r"line 2: output_len is 0, must be a whole number in \[1, 16,777,216\]"),
        ({"prompt": "\ud800"}, r"line 2: prompt is '\\ud800', must be a text"),
        ("[" * 100_000, "line 2: it is nested too deeply"),
        ({"prompt": "a", "arrival_s": -1}, "line 2: arrival_s is -1, must be a number of seconds"),
        ({"prompt": "a", "arrival_s": 1}, "request 1 has no arrival_s and others have; all need one, or none"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_requests(written(tmp_path, {"prompt": "good"}, line))


def test_a_file_without_requests_one_that_is_no_text_and_a_trace_that_lasts_for_ages_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="holds no request"):
        read_requests(written(tmp_path, "", " "))
    lines = ({"prompt": "a", "arrival_s": time} for time in (0, 1e300))
    with pytest.raises(ValueError, match=r"the last request comes 1e\+300 s after the first"):
        read_requests(written(tmp_path, *lines))
    path = tmp_path / "picture.jsonl"
    path.write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ValueError, match=r"picture.jsonl is not UTF-8 text"):
        read_requests(path)


def make_result(name: str, *rates: float) -> LoadResult:
    records = [make_record(index, 0.1 * index, times=(1.0, 1.5, 2.0)) for index in range(4)]
    records.append(RequestRecord(4, 0.5, 0.5, 0.6, error="UNAVAILABLE"))
    reports = [make_report(records, request_rate=rate, max_concurrency=8, slo=Slo(ttft=1.0)) for rate in rates]
    facts = {"version": "0.1.0", "model": "quire-tiny"}
    return LoadResult("bench", name, facts, tuple(Run.of(report, records) for report in reports))


def fail_half_way(path: Path) -> None:
    path.write_text("half")
    raise OSError("full")


def test_a_result_comes_back_and_its_file_stays_whole_where_the_next_cannot_be_written(tmp_path: Path) -> None:
    link, path, result = tmp_path / "newest.json", tmp_path / "new" / "a.json", make_result("quire", 2.0, math.inf)
    result.write(path)
    link.symlink_to(path)
    result.write(link)
    assert link.is_symlink()
    assert LoadResult.read(path) == result
    assert result.runs[0].requests["error"] == [None] * 4 + ["UNAVAILABLE"]
    before = path.read_bytes()
    with pytest.raises(OSError, match="full"):
        replace_file(path, fail_half_way)
    assert path.read_bytes() == before
    assert set(path.parent.iterdir()) == {path}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "its format is not"),
        ('{"format": "quire.load/1"}', "is a damaged result: KeyError"),
        ('{"format": "quire.load/1", "source": 1, "name": 2, "facts": 3, "runs": []}', "is a result without a run"),
    ],
    ids=["cut", "a list", "empty", "no run"],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        LoadResult.read(path)


def test_a_result_that_was_changed_is_refused_by_the_field(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for field, value, message in (
        ("requests_per_s", "many", "requests_per_s is 'many'"),
        ("max_concurrency", "8", "max_concurrency is '8'"),
        ("ttft", {"mean": 1}, "KeyError 'count'"),
        ("ttft", [1], "TypeError"),
        ("request_rate", "fast", "could not convert"),
    ):
        make_result("quire", 2.0).write(path)
        content = json.loads(path.read_text())
        content["runs"][0]["report"][field] = value
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"is a damaged result: .*{message}"):
            LoadResult.read(path)


def test_several_results_make_one_picture_and_the_same_results_the_same_one(tmp_path: Path) -> None:
    failed = RequestRecord(0, 0.0, 0.0, 1.0, error="UNAVAILABLE")
    failures = LoadResult("bench", "away", {}, (Run.of(make_report([failed], request_rate=math.inf), [failed]),))
    results = [make_result("quire", 1.0, 2.0, math.inf), make_result(r"_a $\nonsense$ b", 1.0, 2.0), failures]
    for name in ("a.svg", "b.svg", "a.png"):
        plot(results, tmp_path / name)
    picture = (tmp_path / "a.svg").read_text()
    assert (tmp_path / "b.svg").read_text() == picture
    for text in ("normalized latency", "quire, p99", r"_a $\nonsense$ b, p50", "requests/s"):
        assert text in picture
    # Closed loops appear at their concurrency.
    plot([make_result("quire", math.inf), failures], tmp_path / "c.svg")
    assert "requests at once" in (tmp_path / "c.svg").read_text()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r'a.pdf" must end in .svg or .png'):
        plot([], tmp_path / "a.pdf")
