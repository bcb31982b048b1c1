"""Our own rules of all contracts (docs/api_head.md); `make check` checks buf's rules."""

import re
from pathlib import Path

from tools.proto_descriptors import FILE_SERVICES, SERVICE_METHODS, read_protos

ALL_FILES = read_protos(Path(__file__).resolve().parents[3] / "protos")
# A public standard has its own names; our contracts have rules.
FILES = [file for file in ALL_FILES if file.descriptor.package != "inference"]
DURATIONS_AND_SIZES = re.compile(r"(^|_)(timeout|time_to_live|grace_period|retry_after|memory|space)(_ms|_us|_bytes)?$")


def test_fields_carry_their_unit_and_errors_are_statuses_and_no_fields() -> None:
    for message in (each for file in FILES for each in file.descriptor.message_type):
        for field in message.field:
            assert not (field.type == field.TYPE_STRING and field.name == "error"), f"{message.name}.error"
            if field.type in (field.TYPE_BOOL, field.TYPE_MESSAGE):
                continue
            match = DURATIONS_AND_SIZES.search(field.name)
            assert match is None or match[3], f"{message.name}.{field.name} names no unit"


def test_services_and_methods_are_commented() -> None:
    for file in FILES:
        for index, service in enumerate(file.descriptor.service):
            about_all = file.comment_of(FILE_SERVICES, index)
            for number, method in enumerate(service.method):
                about_one = file.comment_of(FILE_SERVICES, index, SERVICE_METHODS, number)
                assert about_one or about_all, f"{service.name}.{method.name} has no comment"
