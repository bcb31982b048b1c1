"""The programs of the tutorials run as they are written, but for the ports: the server has free ones."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.support.serving import Served

pytestmark = pytest.mark.extended

DOCS = Path(__file__).parents[2] / "docs"
# What the programs of a page print, among other things.
PAGES = {
    "getting-started.md": ["The capital of France is Paris."],
    "tutorials/chat.md": ["The capital of France is Paris.", "The capital of Italy is Rome.", "tokens were cached"],
    "tutorials/structured-output.md": ["city='Paris'", "city='Rome'", "The weather in Rome is sunny, 24 degrees."],
    "tutorials/pinned-prefixes.md": ["blocks", "tokens were cached"],
}


@pytest.mark.parametrize("page", PAGES)
async def test_the_programs_of_a_page_run_one_after_the_other(served: Served, page: str) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL))
    code = code.replace("127.0.0.1:50051", served.server.grpc_address)
    code = code.replace("127.0.0.1:8000", served.server.http_address)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout=200)
    assert process.returncode == 0, err.decode()
    assert [each for each in PAGES[page] if each not in out.decode()] == []


def test_every_page_with_a_program_is_run() -> None:
    pages = {str(page.relative_to(DOCS)) for page in [DOCS / "getting-started.md", *DOCS.glob("tutorials/*.md")]}
    assert {page for page in pages if "```python" in (DOCS / page).read_text()} == set(PAGES)
