"""Makes quire/client/sync_client.py, the blocking client, from quire/client/async_client.py.

usage: python -m tools.generate_sync_client [--check]   (--check writes nothing and fails when the file is not current)

The two differ only in keywords and names: code that behaves differently is in pairs in quire/client/waiting.py.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CLIENT = Path(__file__).resolve().parent.parent / "quire" / "client"
SOURCE, TARGET = CLIENT / "async_client.py", CLIENT / "sync_client.py"

# In this order; names are whole words.
_REPLACEMENTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (
            r"The client for asyncio, from which tools/generate_sync_client\.py makes the blocking one\.",
            "The blocking client. Made from async_client.py by tools/generate_sync_client.py: do not edit.",
        ),
        (r"Any number of tasks of one event loop may use it", "Any number of threads may use it"),
        (r"the request's memory is freed within one step\.", r"\g<0> Any thread may call it."),
        (r"\bgrpc\.aio\b", "grpc"),
        (r"\basync (def|with|for)\b", r"\1"),
        (r"\bawait ", ""),
        (r"\bStopAsyncIteration\b", "StopIteration"),
        (r"\bAsync(Batches|Client|Stream|Event|Iterator)\b", r"\1"),
        (r"\basync_(call|canceller|next_response|requests_of|was_accepted)\b", r"\1"),
        (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    )
)


def generate(source: str) -> str:
    """The blocking client, in our format."""
    text = source
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    for command in (["check", "--select=I", "--fix", "--quiet"], ["format"]):
        arguments = [sys.executable, "-m", "ruff", *command, f"--stdin-filename={TARGET}", "-"]
        text = subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main(argv: Sequence[str]) -> int:
    """Writes or checks the file; 1 when a check fails."""
    parser = argparse.ArgumentParser(description="Makes the blocking client from the asyncio one.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the file is not current")
    arguments = parser.parse_args(argv)
    text = generate(SOURCE.read_text(encoding="utf-8"))
    if not arguments.check:
        TARGET.write_text(text, encoding="utf-8")
        print(f"wrote {TARGET.name}")
        return 0
    if TARGET.read_text(encoding="utf-8") != text:
        print(
            f"{TARGET.name} is not what {SOURCE.name} makes; run `python -m tools.generate_sync_client`",
            file=sys.stderr,
        )
        return 1
    print(f"{TARGET.name} is current")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
