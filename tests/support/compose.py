"""Reads Compose files as a compose parser does, for the features that ours use."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose.yaml"
WITH_TLS = ROOT / "deploy" / "compose.tls.yaml"


def services_of(*files: Path) -> dict[str, Any]:
    """The services by name; mappings and lists of volumes of later files add to earlier ones."""
    services: dict[str, Any] = {}
    for file in files:
        for name, service in yaml.safe_load(file.read_text(encoding="utf-8"))["services"].items():
            services[name] = _merged(services.get(name, {}), service)
    return services


def quire_services_of(*files: Path) -> dict[str, Any]:
    """The services that run Quire's own images."""
    return {name: service for name, service in services_of(*files).items() if service["image"].startswith("quire-")}


def default_of(value: str) -> str:
    """The value without a variable of the environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def _merged(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    merged = earlier | later
    for key in ("environment", "healthcheck"):
        merged[key] = earlier.get(key, {}) | later.get(key, {})
    merged["volumes"] = [*earlier.get("volumes", []), *later.get("volumes", [])]
    return merged
