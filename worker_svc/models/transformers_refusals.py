"""How it is said that a model cannot be served through transformers."""

import contextlib
from collections.abc import Iterator

import torch

from quire.model_directory import ModelDirectory
from quire.settings import ConfigurationError


class UnsupportedModelError(Exception):
    """Why a model cannot be served through transformers' code, as the end of a sentence about it."""


@contextlib.contextmanager
def refusals(described: ModelDirectory) -> Iterator[None]:
    """Turns whatever transformers' code raises into a ConfigurationError of one line that names the model."""
    try:
        yield
    except (ConfigurationError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, UnsupportedModelError) else one_line(error)
        raise ConfigurationError(
            f"{described.architecture} of {described.path} cannot be served through transformers: {reason}"
        ) from error


def one_line(error: Exception) -> str:
    """The name of its class and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
