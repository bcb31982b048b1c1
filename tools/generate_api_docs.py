"""Makes docs/api.md from docs/api_head.md and the comments of the protos.

usage: python -m tools.generate_api_docs [--check]   (--check writes nothing and fails when docs/api.md is not current)
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto

from tools.proto_descriptors import (
    ENUM_VALUES,
    FILE_ENUMS,
    FILE_MESSAGES,
    FILE_SERVICES,
    MESSAGE_FIELDS,
    MESSAGE_MESSAGES,
    MESSAGE_ONEOFS,
    SERVICE_METHODS,
    ProtoFile,
    read_protos,
)

ROOT = Path(__file__).resolve().parent.parent
API_DOCS = ROOT / "docs" / "api.md"
NOTICE = "<!-- Made by tools/generate_api_docs.py (make api-docs) from docs/api_head.md and protos/. Do not edit. -->"

WIDTH = 120

# Places where a line must not break: texts that begin a list or a heading at the start of a line.
STARTS_A_BLOCK = re.compile(r" (?=(?:[-+#>]|\d+[.)]) )")

# The public contract first, then the messages that it uses, then the internal contracts.
PACKAGES = ("quire.gateway.v1", "inference", "quire.common.v1", "quire.scheduler.v1", "quire.worker.v1")


def render(head: str, protos: Iterable[ProtoFile]) -> str:
    """The whole page: the head, then each package with its services, messages and enums."""
    files = sorted(protos, key=lambda file: (_rank(file.descriptor.package), file.descriptor.name))
    parts = [NOTICE, head.strip()]
    for package, members in groupby(files, key=lambda file: file.descriptor.package):
        parts.append(f"## {package}")
        for file in members:
            parts.extend(_render_file(file))
    return "\n\n".join(parts) + "\n"


def _rank(package: str) -> tuple[int, str]:
    return (PACKAGES.index(package) if package in PACKAGES else len(PACKAGES), package)


def _render_file(file: ProtoFile) -> Iterator[str]:
    if file.comment:
        yield _paragraphs(file.comment)
    yield f"Source: `protos/{file.path}`"
    yield from _render_services(file)
    for index, message in enumerate(file.descriptor.message_type):
        yield from _render_message(file, (FILE_MESSAGES, index), message.name, message)
    for index, enum in enumerate(file.descriptor.enum_type):
        yield from _render_enum(file, index, enum)


def _render_services(file: ProtoFile) -> Iterator[str]:
    for index, service in enumerate(file.descriptor.service):
        yield _heading(file, service.name, "service")
        if comment := file.comment_of(FILE_SERVICES, index):
            yield _paragraphs(comment)
        for number, method in enumerate(service.method):
            request = _stream(method.client_streaming) + _type_link(method.input_type)
            response = _stream(method.server_streaming) + _type_link(method.output_type)
            yield f"#### {service.name}.{method.name}"
            yield _wrap(f"{request} → {response}")
            if comment := file.comment_of(FILE_SERVICES, index, SERVICE_METHODS, number):
                yield _paragraphs(comment)


def _render_message(file: ProtoFile, path: tuple[int, ...], name: str, message: DescriptorProto) -> Iterator[str]:
    """The message at `path`, with the messages in it. Its `name` includes the names of the messages around it."""
    yield _heading(file, name, "message")
    if comment := file.comment_of(*path):
        yield _paragraphs(comment)
    yield from _render_fields(file, path, message)
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _render_message(file, (*path, MESSAGE_MESSAGES, index), f"{name}.{nested.name}", nested)


def _render_fields(file: ProtoFile, path: tuple[int, ...], message: DescriptorProto) -> Iterator[str]:
    if not message.field:
        yield "No fields."
        return
    yield "\n".join(
        _item(
            field.name,
            f"{field.number}, {_field_type(message, field)}",
            file.comment_of(*path, MESSAGE_FIELDS, number),
        )
        for number, field in enumerate(message.field)
    )
    for number, oneof in enumerate(message.oneof_decl):
        if comment := file.comment_of(*path, MESSAGE_ONEOFS, number):
            yield _wrap(f"`{oneof.name}`: {_flow(comment)}")


def _render_enum(file: ProtoFile, index: int, enum: EnumDescriptorProto) -> Iterator[str]:
    yield _heading(file, enum.name, "enum")
    if comment := file.comment_of(FILE_ENUMS, index):
        yield _paragraphs(comment)
    yield "\n".join(
        _item(value.name, str(value.number), file.comment_of(FILE_ENUMS, index, ENUM_VALUES, number))
        for number, value in enumerate(enum.value)
    )


def _heading(file: ProtoFile, name: str, kind: str) -> str:
    return f'<a id="{file.descriptor.package}.{name}"></a>\n\n### {kind} {name}'


def _stream(streaming: bool) -> str:
    return "stream of " if streaming else ""


def _field_type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    if (entry := _map_entry(message, field)) is not None:
        key, value = entry.field
        return f"map of {_plain_type(key)} to {_plain_type(value)}"
    name = _plain_type(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _map_entry(message: DescriptorProto, field: FieldDescriptorProto) -> DescriptorProto | None:
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
            return nested
    return None


def _plain_type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _type_link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _type_link(full_name: str) -> str:
    full_name = full_name.removeprefix(".")
    if full_name.startswith("google."):
        return f"`{full_name}`"
    return f"[{full_name.rpartition('.')[2]}](#{full_name})"


def _item(name: str, kind: str, comment: str) -> str:
    """An entry of a list: the name, its number and type, and the comment."""
    return _wrap(f"`{name}` ({kind}){': ' if comment else ''}{_flow(comment)}", first="- ", following="  ")


def _flow(comment: str) -> str:
    return _escape(" ".join(comment.split()))


def _wrap(text: str, first: str = "", following: str = "") -> str:
    """`text` in lines of at most WIDTH columns that begin with `first` and `following`."""
    lines = textwrap.wrap(
        STARTS_A_BLOCK.sub("\N{NO-BREAK SPACE}", text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def _paragraphs(comment: str) -> str:
    """Markdown of a comment: indented lines (tables of errors) keep their shape, all others flow."""
    blocks = []
    for indented, lines in groupby(comment.splitlines(), key=lambda line: line.startswith("  ")):
        if indented:
            blocks.append("\n".join(["```text", *(line.removeprefix("  ") for line in lines), "```"]))
        else:
            blocks.append("\n".join(_escape(line) for line in lines).strip())
    return "\n\n".join(filter(None, blocks))


def _escape(text: str) -> str:
    """Markdown that shows `text` as it is; text in backticks stays untouched."""
    parts = re.split(r"(`[^`]*`)", text)
    escaped = (part if part.startswith("`") else re.sub(r"([*\\])", r"\\\1", part) for part in parts)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in escaped)


def main(argv: Sequence[str]) -> int:
    """Writes or checks docs/api.md; 1 when a check fails."""
    parser = argparse.ArgumentParser(description="Makes docs/api.md from the protos.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when docs/api.md is not current")
    arguments = parser.parse_args(argv)
    page = render((ROOT / "docs" / "api_head.md").read_text(encoding="utf-8"), read_protos(ROOT / "protos"))
    if not arguments.check:
        API_DOCS.write_text(page, encoding="utf-8")
        print("wrote docs/api.md")
        return 0
    if not API_DOCS.is_file() or API_DOCS.read_text(encoding="utf-8") != page:
        print("docs/api.md is not what the protos say; run `make api-docs`", file=sys.stderr)
        return 1
    print("docs/api.md is current")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
