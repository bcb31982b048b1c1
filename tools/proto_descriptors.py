"""Reads the contracts with their comments, by protoc."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from tools.generate_stubs import import_name, run_protoc

# Field numbers of FileDescriptorProto, DescriptorProto, ... that make up the paths of SourceCodeInfo.
FILE_SYNTAX, FILE_MESSAGES, FILE_ENUMS, FILE_SERVICES = 12, 4, 5, 6
MESSAGE_FIELDS, MESSAGE_MESSAGES, MESSAGE_ONEOFS, ENUM_VALUES, SERVICE_METHODS = 2, 3, 8, 2, 2


@dataclass(frozen=True, slots=True)
class ProtoFile:
    """One file of the contract.

    Attributes:
        path: Its place below the folder of all contracts.
        descriptor: The declarations of the file.
        comments: The comment above each declaration, by its path in the descriptor (see SourceCodeInfo.Location).
    """

    path: str
    descriptor: FileDescriptorProto
    comments: dict[tuple[int, ...], str]

    @property
    def comment(self) -> str:
        """The comment at the head of the file."""
        return self.comments.get((FILE_SYNTAX,), "")

    def comment_of(self, *path: int) -> str:
        """The comment above the declaration at `path`, its lines without their marks; empty when there is none."""
        return self.comments.get(path, "")


def read_protos(protos: Path) -> list[ProtoFile]:
    """Every file below `protos`, in the order of their paths.

    Raises RuntimeError when protoc refuses a file; protoc has said why on stderr.
    """
    by_name = {file.name: file for file in read_descriptors(protos, "--include_source_info").file}
    return [
        _with_comments(source.relative_to(protos).as_posix(), by_name[import_name(protos, source)])
        for source in sorted(protos.rglob("*.proto"))
    ]


def read_descriptors(protos: Path, *options: str) -> FileDescriptorSet:
    """The files below `protos` as protoc describes them under these options. Raises RuntimeError, as above."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "descriptors"
        run_protoc(protos, sorted(protos.rglob("*.proto")), f"--descriptor_set_out={out}", *options)
        return FileDescriptorSet.FromString(out.read_bytes())


def _with_comments(path: str, file: FileDescriptorProto) -> ProtoFile:
    return ProtoFile(path, file, dict(_comments_of(file)))


def _comments_of(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    for location in file.source_code_info.location:
        if location.leading_comments:
            lines = (line.removeprefix(" ").rstrip() for line in location.leading_comments.splitlines())
            yield tuple(location.path), "\n".join(lines).strip("\n")
