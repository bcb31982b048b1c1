"""The version of this release; pyproject.toml reads it from here."""

VERSION = "0.2.0.dev0"
