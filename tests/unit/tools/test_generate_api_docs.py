"""The page that is made from the protos: nothing is left out, and comments read as they were written."""

import re
from pathlib import Path

import pytest

from tools import generate_api_docs
from tools.generate_api_docs import NOTICE, render
from tools.proto_descriptors import read_protos

PROTOS = generate_api_docs.ROOT / "protos"

SHELF = """
// Books on shelves.
syntax = "proto3";

package quire.shelf.v1;

// Keeps books. Every method may answer
//   NOT_FOUND   no such shelf
//   INTERNAL    the shelf fell
// Try again later.
service ShelfService {
  // Watches a shelf.
  rpc Watch(stream WatchRequest) returns (stream WatchResponse);
}

// What to watch: 2 * 3 or <s>, but `a * b` stays.
message WatchRequest {
  // Exactly one.
  oneof shelf {
    string name = 1;
    Number number = 2;
  }
  // Where | is a bar,
  // on two lines.
  optional uint32 since = 3;
  repeated Number others = 4;
  map<uint32, Number> by_floor = 5;
}

message WatchResponse {}

message Number {
  double value = 1;
}

// How it stands.
enum Posture {
  POSTURE_UNSPECIFIED = 0;
  // It leans.
  POSTURE_LEANING = 1;
}
"""


@pytest.fixture
def page(tmp_path: Path) -> str:
    (tmp_path / "shelf.proto").write_text(SHELF, encoding="utf-8")
    return render("# Head\n", read_protos(tmp_path))


def test_the_page_starts_with_the_notice_and_the_head(page: str) -> None:
    assert page.startswith(f"{NOTICE}\n\n# Head\n\n## quire.shelf.v1\n\nBooks on shelves.\n")


def test_a_method_shows_its_streams_and_links_its_types(page: str) -> None:
    assert (
        "#### ShelfService.Watch\n\n"
        "stream of [WatchRequest](#quire.shelf.v1.WatchRequest) → "
        "stream of [WatchResponse](#quire.shelf.v1.WatchResponse)\n\n"
        "Watches a shelf.\n" in page
    )


def test_indented_lines_of_a_comment_keep_their_shape(page: str) -> None:
    block = "```text\nNOT_FOUND   no such shelf\nINTERNAL    the shelf fell\n```"
    assert f"Keeps books. Every method may answer\n\n{block}\n\nTry again later.\n" in page


def test_markup_in_a_comment_is_shown_and_not_obeyed(page: str) -> None:
    assert r"What to watch: 2 \* 3 or &lt;s>, but `a * b` stays." in page
    assert "- `since` (3, optional uint32): Where | is a bar, on two lines.\n" in page


def test_fields_show_their_kind(page: str) -> None:
    number = "[Number](#quire.shelf.v1.Number)"
    assert "- `name` (1, string, one of `shelf`)\n" in page
    assert f"- `number` (2, {number}, one of `shelf`)\n" in page
    assert "- `since` (3, optional uint32): " in page
    assert f"- `others` (4, repeated {number})\n" in page
    assert f"- `by_floor` (5, map of uint32 to {number})\n" in page
    assert "`shelf`: Exactly one." in page


def test_long_text_is_wrapped_and_no_line_begins_a_list_by_chance() -> None:
    text = generate_api_docs._wrap("from 0 to n " * 11 + "- 1. " + "from 0 to n " * 11 + "- 1", "- ", "  ")
    assert max(map(len, text.splitlines())) <= 120
    assert not re.search(r"\n *(-|1\.) ", text)


def test_a_message_without_fields_says_so(page: str) -> None:
    assert "### message WatchResponse\n\nNo fields." in page


def test_enum_values_carry_number_and_comment(page: str) -> None:
    assert "- `POSTURE_LEANING` (1): It leans.\n" in page


def test_the_real_page_leaves_nothing_out() -> None:
    files = read_protos(PROTOS)
    page = render("# Head", files)
    for file in files:
        declared = [*file.descriptor.message_type, *file.descriptor.enum_type, *file.descriptor.service]
        for declaration in declared:
            assert f'<a id="{file.descriptor.package}.{declaration.name}"></a>' in page
        for service in file.descriptor.service:
            for method in service.method:
                assert f"#### {service.name}.{method.name}\n" in page


def test_every_link_of_the_real_page_leads_somewhere() -> None:
    page = render("# Head", read_protos(PROTOS))
    anchors = set(re.findall(r'<a id="([^"]+)">', page))
    links = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert links
    assert links <= anchors


def test_the_public_contract_comes_first() -> None:
    page = render("# Head", read_protos(PROTOS))
    packages = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert packages == list(generate_api_docs.PACKAGES)


def test_check_refuses_a_page_that_is_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "api.md"
    monkeypatch.setattr(generate_api_docs, "API_DOCS", page)
    monkeypatch.setattr(generate_api_docs, "ROOT", make_repository(tmp_path))

    assert generate_api_docs.main(["--check"]) == 1
    assert "run `make api-docs`" in capsys.readouterr().err

    assert generate_api_docs.main([]) == 0
    assert generate_api_docs.main(["--check"]) == 0

    page.write_text(page.read_text("utf-8") + "edited by hand\n", encoding="utf-8")
    assert generate_api_docs.main(["--check"]) == 1


def make_repository(root: Path) -> Path:
    (root / "protos").mkdir()
    (root / "protos" / "shelf.proto").write_text(SHELF, encoding="utf-8")
    (root / "docs").mkdir()
    (root / "docs" / "api_head.md").write_text("# Head\n", encoding="utf-8")
    return root
