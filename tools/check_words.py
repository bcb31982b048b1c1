"""Counts words of a private dialect in comments, docstrings, messages, help texts and documents, and refuses more of
them than `tools/allowed_words.tsv` allows in each file.

Usage: python -m tools.check_words [--update] [--show PATH...]

    --update  lower the allowed counts to the present ones
    --show    print each place in these files or folders, with its plain form
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RULES: tuple[tuple[str, str], ...] = (
    # A pattern, and the plain form.
    (r"\b[Ss]o many\b|\b[Aa]s many as\b|\bso much\b", 'the number\'s name: "maximum rows", "number of blocks"'),
    (r"\b[Tt]hose (of|that|which|whose|in|with|from|at|on|for)\b", "the noun: the blocks of, the requests that"),
    (r"\b[Nn]one (where|when)\b", '"None if ..."'),
    (r"\balone\b", '"only", "by itself" or "without ..."'),
    (r"\bbeside\b|\bbesides\b|\bnext to which\b", '"with", "in addition to", "next to" or "while"'),
    (r"\bas far as\b", '"if", "up to" or "the part that"'),
    (
        r"\b([Ww]ho|whom|[Ww]hoever|[Nn]obody|[Ss]omebody|[Aa]nybody|[Ee]verybody)\b",
        "the noun: request, caller, process",
    ),
    (r"\b[Oo]f which\b|\bof whom\b", "a second sentence, or whose"),
    (r"\b(Of|What)\b(?! (is|are|does|do) [^.]*\?)(?![^.?]*\?)", "a sentence that begins with its subject"),
)
_ALLOWED = Path("tools/allowed_words.tsv")
# Released entries are history, and some protos are others' work.
_LEFT_OUT = re.compile(r"(^|/)(CHANGELOG\.md|LICENSE[^/]*|check_words\.py)$|^protos/(inference|envoy)/|\.golden\.")
_SUFFIXES = {".py", ".md", ".proto", ".h", ".cpp"}
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#+ .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Finding:
    """A place where a file uses a word of the dialect."""

    path: str
    line: int
    words: str
    plain: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words!r}: write {self.plain}"


def findings_in(source: str, path: str) -> Iterator[Finding]:
    """The places in a file's prose, in the order of the rules."""
    for line, text in _prose(source, path):
        for pattern, plain in RULES:
            for found in re.finditer(pattern, text):
                yield Finding(path, line + text.count("\n", 0, found.start()), found[0], plain)


def _prose(source: str, path: str) -> Iterator[tuple[int, str]]:
    """Parts of a file that people read, each with the number of its first line."""
    suffix = Path(path).suffix
    if suffix == ".md":
        for pattern in (_FENCE, _CODE, _HEADING):
            source = pattern.sub(_blank, source)
        yield 1, source
    elif suffix == ".py":
        yield from _python_prose(source, is_test=path.startswith("tests/"))
    else:
        for number, line in enumerate(source.splitlines(), 1):
            _, mark, comment = line.partition("//")
            if mark:
                yield number, _CODE.sub(_blank, comment)


def _python_prose(source: str, *, is_test: bool) -> Iterator[tuple[int, str]]:
    """Comments and strings; of a test, whose strings are mostly data, comments and docstrings."""
    docstrings = _lines_of_docstrings(source) if is_test else None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_string = token.type == tokenize.STRING and (docstrings is None or token.start[0] in docstrings)
        if is_string or token.type == tokenize.COMMENT:
            yield token.start[0], _CODE.sub(_blank, token.string)


def _lines_of_docstrings(source: str) -> frozenset[int]:
    return frozenset(
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "-", found[0])


def _tracked(places: Sequence[str]) -> Iterator[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *places]
    for path in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        if Path(path).suffix in _SUFFIXES and not _LEFT_OUT.search(path) and Path(path).is_file():
            yield path


def allowed_counts() -> dict[str, int]:
    """The number of findings that each file may have; 0 for files that are not in the table."""
    rows = (line.split("\t") for line in _ALLOWED.read_text().splitlines())
    return {path: int(count) for path, count in rows}


def main() -> int:
    """Prints the places in files that have more findings than allowed; returns 1 if there are such files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--show", nargs="+", default=())
    options = parser.parse_args()
    found = {path: [*findings_in(Path(path).read_text(), path)] for path in _tracked(options.show)}
    if options.show:
        print(*(finding for findings in found.values() for finding in findings), sep="\n")
        return 0
    allowed = allowed_counts() if _ALLOWED.exists() else {path: len(findings) for path, findings in found.items()}
    if options.update:
        lower = {path: min(len(found[path]), count) for path, count in allowed.items() if path in found}
        _ALLOWED.write_text("".join(f"{path}\t{count}\n" for path, count in sorted(lower.items()) if count))
        return 0
    for path, findings in found.items():
        if len(findings) > allowed.get(path, 0):
            print(f"{path}: {len(findings)} words of the dialect, at most {allowed.get(path, 0)} are allowed:")
            print(*findings, sep="\n")
    return any(len(findings) > allowed.get(path, 0) for path, findings in found.items())


if __name__ == "__main__":
    sys.exit(main())
