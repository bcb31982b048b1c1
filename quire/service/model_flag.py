"""The flag `--model` of services that may serve several models: NAME=DIR,FLAG=VALUE,..."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from quire.model_files.model_directory import EMBEDDED_MODEL, name_of_path
from quire.model_files.model_source import OCI, hub_name

# A comma before a flag's name ends the value before it, which may have commas, too.
_NEXT_FLAG = re.compile(r",(?=[a-z][a-z0-9-]*=)")
_NAME = re.compile(r"[\w][\w./:@+-]{0,127}", re.ASCII)
_PATH_STARTS = ("/", ".", "~")


@dataclass(frozen=True, slots=True)
class ModelFlag:
    """One model.

    Attributes:
        given_name: The name for clients, if the flag has one.
        source: A directory, a file, or a model of a hub, as in `resolve_model`; None is the embedded model.
        overrides: Flags of this model and the texts of their values.
    """

    given_name: str | None = None
    source: str | None = None
    overrides: Sequence[tuple[str, str]] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `DIR`, `NAME=DIR` or either with `,FLAG=VALUE`. An existing path is a path, whatever is in it. Raises
        ValueError."""
        if not text.strip() or "\0" in text:
            raise ValueError("expected DIR or NAME=DIR")
        if Path(text).exists():
            return cls(None, text)
        first, *flags = _NEXT_FLAG.split(text)
        name, equals, source = first.partition("=")
        if not equals or first.startswith(_PATH_STARTS):
            name, source = "", first
        elif not _NAME.fullmatch(name) or not source:
            raise ValueError(
                "expected NAME=DIR, where NAME has 1 to 128 letters, digits and ._/:@+-, a letter or digit first"
            )
        pairs = [flag.partition("=")[::2] for flag in flags]
        return cls(name or None, source, tuple((flag, value) for flag, value in pairs))

    @property
    def name(self) -> str:
        """The name for clients: the given one, or else that of the directory, the file or the repository."""
        if self.given_name is not None or self.source is None:
            return self.given_name or EMBEDDED_MODEL
        if self.source.startswith(OCI):
            return re.split("[:@]", self.source.rpartition("/")[2])[0]
        hub = hub_name(self.source)
        return name_of_path(Path(self.source).expanduser()) if hub is None else hub.repository

    def with_only(self, fields: Collection[str]) -> Self:
        """The same model with the flags of these settings only."""
        return replace(self, overrides=[each for each in self.overrides if each[0].replace("-", "_") in fields])

    def __str__(self) -> str:
        name = "" if self.given_name is None else f"{self.given_name}="
        flags = (f"{flag}={value}" for flag, value in self.overrides)
        return ",".join([f"{name}{self.source or EMBEDDED_MODEL}", *flags])
