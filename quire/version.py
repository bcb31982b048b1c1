"""The version of this release; pyproject.toml reads it from here."""

VERSION = "0.1.0"
