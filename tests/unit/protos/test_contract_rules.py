"""The rules of all contracts (docs/api_head.md): those that buf checks, for machines without it, and our own."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, ServiceDescriptorProto

from tools.proto_descriptors import FILE_SERVICES, SERVICE_METHODS, ProtoFile, read_protos

PROTOS = Path(__file__).resolve().parents[3] / "protos"
# A public standard's names are its own; ours have rules.
ALL_FILES = read_protos(PROTOS)
FILES = [file for file in ALL_FILES if file.descriptor.package != "inference"]
DURATIONS_AND_SIZES = re.compile(r"(^|_)(timeout|time_to_live|grace_period|retry_after|memory|space)(_ms|_us|_bytes)?$")

each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.descriptor.name)


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


@each_file
def test_package_and_folder_are_the_same(file: ProtoFile) -> None:
    folder, _, _ = file.descriptor.name.rpartition("/")
    assert file.descriptor.package == folder.replace("/", ".")
    assert re.fullmatch(r"quire\.[a-z]+\.v\d+", file.descriptor.package)
    assert file.descriptor.syntax == "proto3"


@each_file
def test_every_method_has_its_own_request_and_response(file: ProtoFile) -> None:
    for service in file.descriptor.service:
        assert service.name.endswith("Service")
        for method in service.method:
            assert method.input_type == f".{file.descriptor.package}.{method.name}Request"
            assert method.output_type == f".{file.descriptor.package}.{method.name}Response"


@each_file
def test_enums_start_unspecified_and_values_carry_the_name(file: ProtoFile) -> None:
    for enum in file.descriptor.enum_type:
        prefix = snake_case(enum.name)
        assert enum.value[0].number == 0
        assert enum.value[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(prefix + "_") for value in enum.value)


@each_file
def test_field_names_are_snake_case_and_carry_their_unit(file: ProtoFile) -> None:
    for message in file.descriptor.message_type:
        for field in message.field:
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name)
            if field.type in (field.TYPE_BOOL, field.TYPE_MESSAGE):
                continue
            match = DURATIONS_AND_SIZES.search(field.name)
            assert match is None or match[3], f"{message.name}.{field.name} names no unit"


@each_file
def test_errors_are_statuses_and_no_fields(file: ProtoFile) -> None:
    for message in file.descriptor.message_type:
        for field in message.field:
            is_text = field.type == FieldDescriptorProto.TYPE_STRING
            assert not (is_text and field.name == "error"), f"{message.name}.error"


@each_file
def test_services_and_methods_are_commented(file: ProtoFile) -> None:
    for index, service in enumerate(file.descriptor.service):
        about_all = file.comment_of(FILE_SERVICES, index)
        for number, method in enumerate(service.method):
            about_one = file.comment_of(FILE_SERVICES, index, SERVICE_METHODS, number)
            assert about_one or about_all, f"{service.name}.{method.name} has no comment"


def test_the_services_of_the_design_exist() -> None:
    services: dict[str, ServiceDescriptorProto] = {
        f"{file.descriptor.package}.{service.name}": service
        for file in ALL_FILES
        for service in file.descriptor.service
    }
    assert set(services) == {
        "inference.GRPCInferenceService",
        "quire.common.v1.AdminService",
        "quire.gateway.v1.GenerationService",
        "quire.gateway.v1.ModelService",
        "quire.gateway.v1.PrefixService",
        "quire.scheduler.v1.SchedulerService",
        "quire.worker.v1.WorkerService",
    }
