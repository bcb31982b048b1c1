"""deploy/systemd: units with a common drop-in."""

from pathlib import Path

import pytest

UNITS = Path(__file__).resolve().parents[3] / "deploy" / "systemd"


@pytest.mark.parametrize("name", ["gateway", "scheduler", "worker"])
def test_the_environment_file_of_a_service_overrides_the_common_one(name: str) -> None:
    # In the order in which systemd reads them; of a variable in two environment files the last one counts.
    read = [UNITS / f"quire-{name}.service", *sorted((UNITS / "quire-.service.d").iterdir())]
    lines = [line for path in read for line in path.read_text(encoding="utf-8").splitlines()]
    files = [line.partition("=")[2] for line in lines if line.startswith("EnvironmentFile=")]
    assert files == ["-/etc/quire/quire.env", f"-/etc/quire/{name}.env"]
