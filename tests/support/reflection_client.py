"""A client that knows nothing of the contract but what the server's reflection tells, called like grpcurl."""

import json
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one command line `grpcurl -plaintext [-d JSON] ADDRESS {list | SERVICE/METHOD}`."""

    address: str
    target: str
    data: str = "{}"

    @classmethod
    def parse(cls, arguments: list[str]) -> "Call":
        """Raises ValueError for a flag that is not known here."""
        words, data = [], "{}"
        rest = iter(arguments)
        for word in rest:
            if word == "-d":
                data = next(rest)
            elif word.startswith("-") and word != "-plaintext":
                raise ValueError(f"unknown flag {word}")
            elif word != "-plaintext":
                words.append(word)
        address, target = words
        return cls(address, target, data)

    def run(self) -> list[str]:
        """The services for `list`; else each answer of the method as JSON. Raises grpc.RpcError."""
        with grpc.insecure_channel(self.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            if self.target == "list":
                return sorted(database.get_services())
            service, name = self.target.split("/")
            method = DescriptorPool(database).FindServiceByName(service).FindMethodByName(name)
            request = json_format.ParseDict(json.loads(self.data), GetMessageClass(method.input_type)())
            invoke: Any = (channel.unary_stream if method.server_streaming else channel.unary_unary)(
                f"/{self.target}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            answer = invoke(request, timeout=30)
            answers = list(answer) if method.server_streaming else [answer]
            return [json_format.MessageToJson(each) for each in answers]
