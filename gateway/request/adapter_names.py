"""The adapters that this gateway serves: names for digests. Schedulers and workers know only the digest.

Removing a name ends no request: admitted requests hold the digest.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.auth.caller import Caller, current_caller
from gateway.replicas.generation_request import NamedAdapter
from gateway.replicas.placements import adapters_are_off
from gateway.request.violations import shortened
from quire.model_files.adapter_files import NoAdapterError, UnusableAdapterError, check_fits, read_adapter
from quire.model_files.model_directory import ModelDirectory
from quire.rpc.errors import (
    AlreadyExists,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    invalid_field,
)
from quire.runtime.settings import ConfigurationError

MAX_ADAPTERS = 4096
"""The maximum names of a gateway; --max-adapters limits the adapters in workers' memory at once."""
_NAME = re.compile(r"[\w][\w./:@+-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """A named adapter and its rank."""

    named: NamedAdapter
    rank: int


class Adapters:
    """The served adapters by name, and the names of the model without an adapter.

    Args:
        model: The name of the model.
        directory: The directory of the model; adapters must fit its shape.
        slots: Returns the maximum adapters at once of each known replica.
        refusal: The reason why names cannot change while the gateway runs; None if they can.
        aliases: Further names of the model.
    """

    def __init__(
        self,
        model: str,
        directory: Path,
        slots: Callable[[], Sequence[int]],
        refusal: str | None = None,
        *,
        aliases: Sequence[str] = (),
    ) -> None:
        self.model = model
        self._directory = directory
        self._slots = slots
        self._refusal = refusal
        self.aliases = tuple(dict.fromkeys(aliases))
        self._served: dict[str, ServedAdapter] = {}
        self._reading = asyncio.Lock()

    async def open(self, adapters: Sequence[str]) -> None:
        """Serves adapters, each given as NAME=DIRECTORY. Raises ConfigurationError."""
        for each in adapters:
            name, _, directory = each.partition("=")
            try:
                await self._add(name, directory)
            except (AlreadyExists, InvalidArgument, ResourceExhausted) as error:
                raise ConfigurationError(f"--adapters {each}: {error.message}") from error

    def visible(self, caller: Caller, model: str | None) -> str | None:
        """The name to serve a call that names `model`: the adapter's, or else the model's; None if the caller may use
        neither."""
        if model is not None and model in self.aliases:
            # A caller that may use the model may use it by every name.
            return None if caller.visible(self.model) is None and caller.visible(model) is None else model
        own = None if model is None or model not in self._served else caller.visible(model)
        return own or caller.visible(self.model)

    def names(self, caller: Caller) -> list[str]:
        """All names that the caller may use: the model's names, then its adapters' names."""
        own = [name for name in (self.model, *self.aliases) if self.visible(caller, name) == name]
        return [*own, *(each.named.name for each in self.listed(caller))]

    def all_names(self) -> list[str]:
        """All names: the model's names, then its adapters' names."""
        return [self.model, *self.aliases, *self._served]

    def parent_of(self, name: str) -> str | None:
        """The model that the adapter with this name adapts; None for a name of the model."""
        return None if name == self.model or name in self.aliases else self.model

    def resolve(self, model: str | None) -> NamedAdapter | None:
        """The adapter with this name; None for the model itself. Raises InvalidArgument if the adapter is gone."""
        if model is None or self.parent_of(model) is None:
            return None
        if (served := self._served.get(model)) is None:
            description = f'is "{shortened(model)}"; this adapter was unloaded'
            raise InvalidArgument.of_field("model", description, reason="MODEL_NOT_FOUND")
        return served.named

    def listed(self, caller: Caller) -> list[ServedAdapter]:
        """The adapters that the caller may use, in the order in which they were loaded."""
        return [each for name, each in self._served.items() if caller.visible(name) is not None]

    async def load(
        self, name: str, directory: str, *, replace: bool, name_field: str, directory_field: str
    ) -> ServedAdapter:
        """Serves an adapter from now on, for an operator. The field names are taken from the caller's API.

        With `replace` the name may already belong to an adapter. Requests that were admitted before keep the old
        adapter: they and their cached blocks refer to it by digest.

        Raises:
            PermissionDenied: the caller is no operator.
            FailedPrecondition: the workers take no adapters, or names cannot change here.
            AlreadyExists, InvalidArgument, ResourceExhausted: the name is taken, a value is wrong, or there are too
                many.
        """
        self._check_operator()
        if (slots := self._slots()) and not any(slots):
            raise adapters_are_off()
        return await self._add(name, directory, name_field, directory_field, replace=replace)

    def unload(self, name: str, *, name_field: str) -> None:
        """Removes a name, for an operator; running requests continue. Raises PermissionDenied, FailedPrecondition or
        NotFound."""
        self._check_operator()
        if self._served.pop(name, None) is None:
            description = f'is "{shortened(name)}", which is no adapter that is served here'
            raise NotFound.of_field(name_field, description, reason="ADAPTER_NOT_FOUND")

    async def _add(
        self,
        name: str,
        directory: str,
        name_field: str = "name",
        directory_field: str = "directory",
        *,
        replace: bool = False,
    ) -> ServedAdapter:
        self._check_name(name, name_field, replace=replace)
        if not Path(directory).is_absolute():
            # Workers may have another working directory.
            raise invalid_field(directory_field, f'is "{shortened(directory)}"; it must be an absolute path')
        async with self._reading:
            try:
                adapter = await asyncio.to_thread(read_adapter, directory)
                check_fits(adapter, (await asyncio.to_thread(ModelDirectory.open, self._directory)).config)
            except UnusableAdapterError as error:
                message, violations = f"{directory_field}: {error}", [FieldViolation(directory_field, str(error))]
                if isinstance(error, NoAdapterError):
                    raise InvalidArgument(message, reason="NO_ADAPTER_IN_DIRECTORY", violations=violations) from error
                raise InvalidArgument(message, reason="UNUSABLE_ADAPTER", violations=violations) from error
            # Another call may have taken it meanwhile.
            self._check_name(name, name_field, replace=replace)
            served = ServedAdapter(NamedAdapter(name, adapter.digest, str(adapter.directory)), adapter.rank)
            self._served[name] = served
        return served

    def _check_name(self, name: str, field: str, *, replace: bool) -> None:
        if not _NAME.fullmatch(name):
            raise invalid_field(
                field,
                f'is "{shortened(name)}"; it must have 1 to 128 letters, digits and ._/:@+-, a letter or digit first',
            )
        if name in self._served and replace:
            return
        if self.parent_of(name) is None or name in self._served:
            description = f'is "{name}", the name of the model; choose another name'
            if name in self._served:
                description = (
                    f'is "{name}", the name of an adapter that is served already; choose another name, or replace it '
                    "(load_inplace over HTTP, replace over gRPC)"
                )
            raise AlreadyExists.of_field(field, description, reason="ADAPTER_EXISTS")
        if len(self._served) >= MAX_ADAPTERS:
            raise ResourceExhausted(f"{MAX_ADAPTERS:,} adapters are served; unload one first", reason="ADAPTER_LIMIT")

    def _check_operator(self) -> None:
        if not current_caller().access.is_operator:
            raise PermissionDenied("adapters are loaded by the API keys of operators", reason="OPERATORS_ONLY")
        if self._refusal is not None:
            raise FailedPrecondition(self._refusal, reason="ADAPTERS_FIXED")
