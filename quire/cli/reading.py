"""What commands read as text."""

import sys
from pathlib import Path

from quire.settings import ConfigurationError


def read_text(file: str) -> str:
    """A whole text; - is stdin. Raises ConfigurationError where it cannot be read, or is not UTF-8."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise not_utf8("stdin" if file == "-" else file, error) from error


def not_utf8(name: str, error: UnicodeDecodeError) -> ConfigurationError:
    return ConfigurationError(f"{name} is not UTF-8: {error}")
