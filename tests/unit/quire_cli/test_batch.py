"""Changes of `quire batch` to its output file before any server starts."""

import json
from pathlib import Path

import pytest

from gateway.api.batches.store import Line
from quire.runtime.settings import ConfigurationError
from quire_cli.batch import _Output

LINES = [Line(number, f"r{number}", 0, 0) for number in (1, 2)]
ANSWER = b'{"id":"batch_req_1","custom_id":"r1","response":{"status_code":200},"error":null}\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps({"custom_id": each.custom_id, "body": {}}) for each in LINES))
    return path


@pytest.mark.parametrize(
    "content",
    [b"notes in one line", b"notes\n", b'{"custom_id": "r1"}\n', b'{"custom_id": "r1"', ANSWER + b"and notes"],
)
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, source: Path, content: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="no answer"):
        _Output(str(path)).resume(source, LINES)
    assert path.read_bytes() == content


def test_requests_are_never_their_own_answers(tmp_path: Path, source: Path) -> None:
    before, link = source.read_bytes(), tmp_path / "link"
    link.symlink_to(source)
    for path in (source, link):
        with pytest.raises(ConfigurationError, match="is the file of the requests"):
            _Output(str(path)).resume(source, LINES)
    assert source.read_bytes() == before


@pytest.mark.parametrize("place", ["nothing/out", "."])
def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path: Path, source: Path, place: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--output .* cannot be used"):
        _Output(str(tmp_path / place)).resume(source, LINES)


@pytest.mark.parametrize("rest", [b"", ANSWER[:5], ANSWER.replace(b"r1", b"r2")[:40]])
def test_a_run_goes_on_behind_the_last_whole_answer(tmp_path: Path, source: Path, rest: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(ANSWER + rest)
    output = _Output(str(path))
    output.resume(source, LINES)
    assert (output.num_written, path.read_bytes()) == (1, ANSWER)
