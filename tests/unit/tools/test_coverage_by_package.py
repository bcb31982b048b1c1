from tools.coverage_by_package import lines


def summary(*counts: int) -> dict[str, dict[str, int]]:
    names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    return {"summary": dict(zip(names, counts, strict=True))}


def test_files_are_added_up_by_their_package_and_in_all() -> None:
    files = {
        "quire/rpc/tls.py": summary(10, 9, 4, 2),
        "quire/rpc/server.py": summary(30, 27, 0, 0),
        "quire/settings.py": summary(60, 60, 0, 0),
        "gateway/api/openai/read.py": summary(1000, 500, 10, 5),
    }
    assert list(lines(files))[2:] == [
        "| `gateway/api` | 1,000 | 50.0% | 10 | 50.0% |",
        "| `quire` | 60 | 100.0% | 0 |  |",
        "| `quire/rpc` | 40 | 90.0% | 4 | 50.0% |",
        "| `all` | 1,100 | 54.2% | 14 | 50.0% |",
    ]
