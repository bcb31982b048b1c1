"""Random and mutated messages for any method, from its descriptors alone; and which answers to them are right."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

_INTEGER_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (31, True),
    FieldDescriptor.CPPTYPE_INT64: (63, True),
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
}
_NUMBERS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "hello", "quire-tiny", "user", "\0", "é" * 40, "\U0001f40d\u202e", " " * 300, "{}", "a" * 5000)
_DEEPEST = 4

# What a caller may hear of a request that is nonsense. Not among them: UNKNOWN and INTERNAL, a defect of the server;
# UNAVAILABLE, a crash; DEADLINE_EXCEEDED, a hang.
_FAIR = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.CANCELLED,
}

# A pin is ended by its time to live, or by another caller who made the same one, while it is being computed.
_LOST_TO_A_NEIGHBOUR = {"PIN_LOST"}


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """Makes messages; the same seed makes the same ones."""

    rng: random.Random

    def message(self, message_class: type[Message], depth: int = 0) -> Message:
        """A message some of whose fields are set, most of them to values at the edge of something."""
        message = message_class()
        fields: Any = message.DESCRIPTOR.fields
        for field in fields:
            if self.rng.random() < 0.5:
                self._set(message, field, depth)
        return message

    def mutated(self, message: Message) -> bytes:
        """The bytes of a message, at times with some of them changed, lost, doubled or appended."""
        data = bytearray(message.SerializeToString())
        match self.rng.randrange(6):
            case 0 if data:
                for _ in range(self.rng.randint(1, 4)):
                    data[self.rng.randrange(len(data))] = self.rng.randrange(256)
            case 1:
                del data[self.rng.randrange(len(data) + 1) :]
            case 2:
                data += self.rng.randbytes(self.rng.randint(1, 20))
            case 3 if data:
                start = self.rng.randrange(len(data))
                data[start:start] = data[start : start + self.rng.randint(1, 50)]
        return bytes(data)

    def integer(self, bits: int, *, signed: bool) -> int:
        """Mostly small, at times the largest or smallest that fits."""
        edge = self.rng.choice([0, 1, 2, 3, 7, 100, 2**31 - 1, 2**bits - 1])
        value = min(edge, 2**bits - 1)
        return self.rng.choice([value, value, -value, -value - 1]) if signed else value

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None:
            self._set_message(message, field, depth)
        elif field.is_repeated:
            getattr(message, field.name).extend(self._value(field) for _ in range(self.rng.randrange(5)))
        else:
            setattr(message, field.name, self._value(field))

    def _set_message(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if depth >= _DEEPEST:
            return
        assert field.message_type is not None
        if field.message_type.GetOptions().map_entry:
            self._set_map_entry(message, field, depth)
            return
        targets = (
            [getattr(message, field.name).add() for _ in range(self.rng.randrange(4))]
            if field.is_repeated
            else [getattr(message, field.name)]
        )
        for target in targets:
            target.SetInParent() if not field.is_repeated else None
            target.MergeFrom(self.message(type(target), depth + 1))

    def _set_map_entry(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        assert field.message_type is not None
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        entries = getattr(message, field.name)
        if value.message_type is None:
            entries[self._value(key)] = self._value(value)
        else:
            entry = entries[self._value(key)]
            entry.MergeFrom(self.message(type(entry), depth + 1))

    def _value(self, field: FieldDescriptor) -> Any:
        if field.cpp_type in _INTEGER_BITS:
            bits, signed = _INTEGER_BITS[field.cpp_type]
            return self.integer(bits, signed=signed)
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return self.rng.choice([0, 1, 2, 3, 4, 999, -1])
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return self.rng.choice(_NUMBERS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.rng.choice([b"", b"\0" * 4, self.rng.randbytes(8), b"\1\0\0\0" * 3, self.rng.randbytes(401)])
        return self.rng.choice(_TEXTS)


def methods_of(address: str) -> Iterator[MethodDescriptor]:
    """Every method of every service that a server's reflection tells of."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        for name in sorted(database.get_services()):
            service: ServiceDescriptor = pool.FindServiceByName(name)
            yield from service.methods


def input_class(method: MethodDescriptor) -> type[Message]:
    return GetMessageClass(method.input_type)


def check_status(error: Any, what: str) -> None:
    """Fails unless the error of a call is one that a nonsensical request may get, with the details that all of ours
    carry."""
    code = error.code()
    status = rpc_status.from_call(error)
    if status is None:
        assert code in _FAIR, f"{what}: {error}"
        # gRPC itself refuses unknown methods and messages above the size limit.
        assert code in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED}, f"{what}: untyped {error}"
        return
    infos = [
        error_details_pb2.ErrorInfo.FromString(each.value) for each in status.details if "ErrorInfo" in each.type_url
    ]
    (info,) = infos
    assert info.domain == "quire", f"{what}: {error}"
    assert code in _FAIR or info.reason in _LOST_TO_A_NEIGHBOUR, f"{what}: {error}"
