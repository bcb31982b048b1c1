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


def test_every_file_names_its_package_in_each_language() -> None:
    for file in ALL_FILES:
        options, parts = file.descriptor.options, file.descriptor.package.split(".")
        folder = ["quire", *parts[-1:]] if len(parts) == 1 else parts
        capitals = [part.capitalize() for part in parts]
        assert options.go_package == f"{'/'.join(folder)};{''.join(folder[1:])}", file.path
        assert options.java_package == file.descriptor.package, file.path
        assert options.java_multiple_files, file.path
        assert options.java_outer_classname.endswith("Proto"), file.path
        assert options.csharp_namespace == ".".join(capitals), file.path
        assert options.ruby_package == "::".join(capitals), file.path
        assert options.php_namespace == "\\".join(capitals), file.path


def test_public_contracts_import_no_internal_one() -> None:
    internal = {file.descriptor.name for file in ALL_FILES if file.path.startswith("internal/")}
    assert internal
    for file in ALL_FILES:
        assert file.descriptor.name in internal or internal.isdisjoint(file.descriptor.dependency), file.path
