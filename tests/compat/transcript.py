"""The messages of a release, and the contracts by which they were written.

A folder for each release has

    contracts.binpb.gz  the FileDescriptorSet of its protos; message classes are made from it when it is read
    messages.gz         messages between its services and with a client, call by call, as bytes
    recording.gz        the file that its scheduler wrote with `--record`
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

ROOT = Path(__file__).parent
CONTRACTS, MESSAGES, RECORDING = "contracts.binpb.gz", "messages.gz", "recording.gz"


def releases() -> list[Path]:
    """The folders of the releases whose messages are stored."""
    return sorted(path.parent for path in ROOT.glob(f"*/{CONTRACTS}"))


@dataclass(slots=True)
class Call:
    """One call and its messages, in the order in which they passed. The status is a number of google.rpc.Code."""

    method: str
    messages: list[tuple[bool, bytes]] = field(default_factory=list[tuple[bool, bytes]])
    """Whether it is a request, and its bytes."""
    status: int | None = None

    @property
    def requests(self) -> list[bytes]:
        return [data for is_request, data in self.messages if is_request]

    @property
    def responses(self) -> list[bytes]:
        return [data for is_request, data in self.messages if not is_request]


def write_calls(path: Path, calls: Iterable[Call]) -> None:
    """A line of JSON for each call, followed by the bytes of its messages. The same calls make the same file."""
    parts: list[bytes] = []
    for call in calls:
        sizes = [len(data) if is_request else -len(data) - 1 for is_request, data in call.messages]
        parts.append(json.dumps({"method": call.method, "status": call.status, "sizes": sizes}).encode() + b"\n")
        parts += [data for _, data in call.messages]
    path.write_bytes(gzip.compress(b"".join(parts), mtime=0))


def read_calls(path: Path) -> Iterator[Call]:
    """Reads a file that `write_calls` wrote."""
    content = decompressed(path)
    at = 0
    while at < len(content):
        end = content.index(b"\n", at)
        entry = json.loads(content[at:end])
        at = end + 1
        call = Call(entry["method"], status=entry["status"])
        for size in entry["sizes"]:
            length = size if size >= 0 else -size - 1
            call.messages.append((size >= 0, content[at : at + length]))
            at += length
        yield call


class Contracts:
    """The message classes of a release, made of its descriptors; independent of today's classes."""

    def __init__(self, descriptors: FileDescriptorSet) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in descriptors.file:
            self._pool.Add(file)

    @classmethod
    def read(cls, path: Path) -> "Contracts":
        return cls(FileDescriptorSet.FromString(decompressed(path)))

    def message(self, name: str, data: bytes = b"") -> Any:
        """A message of this type, by its full name."""
        message = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))()
        message.ParseFromString(data)
        return message

    def request(self, method: str, data: bytes) -> Any:
        """A request of "/PACKAGE.SERVICE/METHOD"."""
        return self.message(self._method(method).input_type.full_name, data)

    def response(self, method: str, data: bytes) -> Any:
        return self.message(self._method(method).output_type.full_name, data)

    def _method(self, path: str) -> Any:
        service, _, name = path.removeprefix("/").partition("/")
        return self._pool.FindMethodByName(f"{service}.{name}")


def unknown_fields(message: Message) -> Iterator[str]:
    """Parts of the received bytes that the message's type does not have, at any depth: fields as TYPE.NUMBER, values of
    enums as ENUM=NUMBER."""
    for unknown in UnknownFieldSet(message):
        yield f"{message.DESCRIPTOR.full_name}.{unknown.field_number}"
    for descriptor, value in message.ListFields():
        values = list(value) if descriptor.is_repeated else [value]
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            descriptor, values = descriptor.message_type.fields_by_name["value"], list(value.values())
        if descriptor.message_type is not None:
            for each in values:
                yield from unknown_fields(each)
        elif descriptor.enum_type is not None:
            known = descriptor.enum_type.values_by_number
            yield from (f"{descriptor.enum_type.full_name}={each}" for each in values if each not in known)


def decompressed(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())
