"""`make check` finds what is wrong with contracts and manifests, and fails where a tool that it needs is missing."""

import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tools import check_compose, check_kubernetes, lint_protos
from tools.kubernetes_manifests import Manifests


def test_the_contracts_are_linted(capfd: pytest.CaptureFixture[str]) -> None:
    assert lint_protos.main() == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].endswith("files compile")
    assert lines[-1] == "buf lint: passed"


def test_without_buf_the_lint_fails_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint_protos, "BUF", tmp_path / "buf")
    assert lint_protos.main() == 1
    assert f"there is no {tmp_path / 'buf'}; `make setup` installs it" in capsys.readouterr().out


def test_the_compose_files_fit_the_specification(capfd: pytest.CaptureFixture[str]) -> None:
    assert check_compose.main([]) == 0
    assert capfd.readouterr().out.count("compose schema: passed") == 2


@pytest.mark.parametrize("service", ["{image: press, port: 80}", "{image: press, restart: [always]}"])
def test_a_compose_file_with_an_unknown_or_wrong_field_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], service: str
) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(f"services: {{press: {service}}}\n", encoding="utf-8")
    assert check_compose.main([str(file)]) != 0
    assert "compose schema: failed" in capfd.readouterr().out


def test_without_the_checker_of_compose_files_the_check_fails_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_compose, "find_spec", lambda name: None)
    assert check_compose.main([]) == 1
    assert "check-jsonschema is not installed; `make setup` installs it" in capsys.readouterr().out


def test_the_manifests_fit_the_schemas_of_kubernetes(capfd: pytest.CaptureFixture[str]) -> None:
    assert check_kubernetes.main() == 0
    assert capfd.readouterr().out.splitlines()[0] == "kubernetes: 12 documents"


def misspell(document: dict[str, Any]) -> None:
    document["spec"]["replica"] = 2


def quote_a_port(document: dict[str, Any]) -> None:
    document["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "grpc"


@pytest.mark.parametrize(("change", "named"), [(misspell, "'replica'"), (quote_a_port, "'grpc'")])
def test_a_field_that_no_schema_has_or_of_another_type_is_found(
    change: Callable[[dict[str, Any]], None], named: str
) -> None:
    manifests = Manifests.read(check_kubernetes.DIRECTORY)
    documents = copy.deepcopy(manifests.documents)
    (worker,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == ("StatefulSet", "worker"))
    change(cast(dict[str, Any], worker))
    found = list(check_kubernetes.schema_problems(dataclasses.replace(manifests, documents=documents)))
    assert found
    assert all(line.startswith("StatefulSet worker: ") and named in line for line in found)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("resource", ["gateway.yaml"], "resource is no field of a kustomization that we use"),
        ("kind", "Component", "its kind is Component"),
        (
            "configMapGenerator",
            [{"name": "settings", "literals": ["QUIRE_LOG_LEVEL"]}],
            "QUIRE_LOG_LEVEL is not NAME=VALUE",
        ),
    ],
)
def test_what_kustomize_would_refuse_is_found(field: str, value: Any, named: str) -> None:
    manifests = Manifests.read(check_kubernetes.DIRECTORY)
    kustomization = {**manifests.kustomization, field: value}
    assert any(
        named in line for line in check_kubernetes.problems(dataclasses.replace(manifests, kustomization=kustomization))
    )


def test_without_the_schemas_the_check_fails_and_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
    assert check_kubernetes.main() == 1
    assert "kubernetes_validate is not installed; `make setup` installs" in capsys.readouterr().out
