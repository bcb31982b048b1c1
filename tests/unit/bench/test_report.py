import json
from pathlib import Path

from bench.report import Series, write_results


def test_results_say_what_was_measured_where_and_of_which_commit(tmp_path: Path) -> None:
    write_results(tmp_path / "results.json", "a title", [Series("rate", "1/s", (1.0, 3.0, 2.0))], note="x")
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["series"] == [{"name": "rate", "unit": "1/s", "median": 2.0, "values": [1.0, 3.0, 2.0]}]
    assert result["commit"]
    assert {"processor", "cores", "instruction_set", "load_at_start", "python"} == result["machine"].keys()
    assert "quire" in result["versions"]
    assert result["note"] == "x"
