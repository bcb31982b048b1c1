"""Settings of tests that serve one model."""

from collections.abc import Mapping
from typing import Any

from quire.service.model_flag import ModelFlag


def with_models(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose `model`, a directory, is the one of their models."""
    values = dict(settings)
    directory = values.pop("model", None)
    return values if directory is None else values | {"models": (ModelFlag(None, directory),)}
