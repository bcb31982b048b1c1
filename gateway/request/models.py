"""The models of a gateway, each with a generator, and the choice of one for a call: by the name that the call gives, or
by the kind of answer that it wants."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from gateway.auth.caller import Caller, current_caller
from gateway.replicas.link import SchedulerLink
from gateway.replicas.scheduler_calls import ReplicaLoad
from gateway.request.generator import Generator
from gateway.request.validation import wrong_model
from gateway.request.violations import shortened
from gateway.types import ModelKind
from quire.rpc.errors import AlreadyExists, FieldViolation, InvalidArgument, NotFound, QuireError, Unimplemented
from quire.runtime.settings import ConfigurationError

Found = TypeVar("Found")
# The maximum number of names in an error.
_SHOWN = 8


class Models:
    """The generators of all served models; the first one is the default.

    With one model, every call is its generator's, which checks name and kind of the model itself.
    """

    def __init__(self, generators: Sequence[Generator]) -> None:
        """Raises ConfigurationError if two models have a name in common."""
        self._generators = tuple(generators)
        seen = dict[str, str]()
        for each in generators:
            for name in each.adapters.all_names():
                if name in seen:
                    raise ConfigurationError(
                        f'the name "{name}" is of the models {seen[name]} and {each.model.name}; names of models, '
                        "aliases and adapters must be unique: --model NAME=DIR sets a model's"
                    )
                seen[name] = each.model.name

    def __iter__(self) -> Iterator[Generator]:
        return iter(self._generators)

    @property
    def default(self) -> Generator:
        """The generator of the first model."""
        return self._generators[0]

    @property
    def default_text(self) -> Generator:
        """The generator of the first model that generates text; the first one if there is none."""
        return next((each for each in self if each.model.kind is ModelKind.TEXT), self.default)

    @property
    def are_several(self) -> bool:
        return len(self._generators) > 1

    @property
    def is_ready(self) -> bool:
        """Whether a request to one of the models would run at once."""
        return any(each.is_ready for each in self)

    @property
    def has_replica(self) -> bool:
        """Whether a replica of one of the models is ready."""
        return any(each.replicas.is_ready for each in self)

    @property
    def is_draining(self) -> bool:
        return any(each.is_draining for each in self)

    @property
    def num_live(self) -> int:
        """Requests that run at this gateway."""
        return sum(each.num_live for each in self)

    @property
    def links(self) -> Mapping[str, SchedulerLink]:
        """The links to the schedulers of all models, by address."""
        return {address: link for each in self for address, link in each.replicas.links.items()}

    def owner_of(self, address: str) -> Generator | None:
        """The generator whose scheduler has this address."""
        return next((each for each in self if address in each.replicas.links), None)

    def names(self, caller: Caller) -> list[str]:
        """All names of models, aliases and adapters that the caller may use, model by model."""
        return [name for each in self for name in each.adapters.names(caller)]

    def violation(self, name: str) -> FieldViolation | None:
        """Why the caller may not use the model, alias or adapter with this name; None if it may."""
        caller = current_caller()
        if not self.are_several:
            return wrong_model(name, self.default.adapters.visible(caller, name))
        if self._find(caller, name) is not None:
            return None
        served = [f'"{each}"' for each in self.names(caller)]
        others = [f"{len(served) - _SHOWN:,} others"] * (len(served) > _SHOWN)
        known = ", ".join([*served[:_SHOWN], *others])
        why = f"the models served here are {known}" if served else "no model is served here that this API key may use"
        return FieldViolation("model", f'is "{shortened(name)}"; {why}')

    def named(self, name: str, error: type[QuireError] = NotFound) -> Generator:
        """The generator that serves the model, alias or adapter with this name to the caller. Raises `error`, with the
        reason MODEL_NOT_FOUND, if there is none that the caller may use."""
        if (violation := self.violation(name)) is not None:
            raise error.of_field("model", violation.description, reason="MODEL_NOT_FOUND")
        return self._find(current_caller(), name) or self.default

    def of(self, name: str | None, kind: ModelKind | None = None) -> Generator:
        """The generator for a call that wants answers of this kind, or for a call that any model can answer. Without a
        name it is the first model of the kind that the caller may use.

        Raises:
            InvalidArgument: several models are served, and the caller may not use one with this name.
            Unimplemented: that model gives something else, and another one of this gateway gives answers of the kind.
        """
        if not self.are_several:
            return self.default
        usable = [each for each in self if each.adapters.visible(current_caller(), None) is not None]
        fitting = next((each for each in usable if kind in (None, each.model.kind)), None)
        if not name:
            return fitting or (usable or self._generators)[0]
        generator = self.named(name, InvalidArgument)
        if kind is not None and kind is not generator.model.kind and fitting is not None:
            raise Unimplemented(
                f'model "{shortened(name)}" {generator.model.kind.value}; "{fitting.model.name}" {kind.value}',
                reason="WRONG_KIND_OF_MODEL",
            )
        return generator

    def _find(self, caller: Caller, name: str) -> Generator | None:
        return next((each for each in self if each.adapters.visible(caller, name) == name), None)

    def for_adapter(self, name: str, name_field: str) -> Generator:
        """The generator that gets a new adapter: that of the first model that generates text, or of the adapter with
        this name. Raises AlreadyExists if the name is of another model."""
        holder = next((each for each in self if name in each.adapters.all_names()), None)
        if holder is not None and holder is not self.default_text and holder.adapters.parent_of(name) is None:
            description = f'is "{shortened(name)}", the name of a model; choose another name'
            raise AlreadyExists.of_field(name_field, description, reason="ADAPTER_EXISTS")
        return holder or self.default_text

    def with_adapter(self, name: str) -> Generator:
        """The generator with the adapter of this name; the default one if there is none."""
        holders = (each for each in self if name in each.adapters.all_names() and each.adapters.parent_of(name))
        return next(holders, self.default)

    async def holding(self, request_id: str) -> Generator:
        """The generator that has a durable request of the caller's tenant. Raises the errors of `find_durable`."""
        if not self.are_several:
            return self.default
        tenant = current_caller().tenant
        for each in self:
            if each.holds(tenant, request_id):
                return each

        async def find(generator: Generator) -> Generator:
            await generator.replicas.calls.find_durable(tenant, request_id)
            return generator

        return await _first_found([partial(find, each) for each in self if each.model.kind is ModelKind.TEXT])

    async def cancel(self, request_id: str) -> None:
        """Ends a running request of the caller's tenant, whichever model answers it. Raises as `Generator.cancel`."""
        tenant = current_caller().tenant
        here = [each for each in self if each.holds(tenant, request_id)]
        await _first_found([partial(each.cancel, request_id) for each in here or self])

    async def loads(self, gateway_id: str) -> Mapping[str, ReplicaLoad]:
        """The loads of the replicas of all models that answer within a second, by address."""
        found = await asyncio.gather(*(each.replicas.calls.loads(gateway_id) for each in self))
        return {address: load for loads in found for address, load in loads.items()}

    async def unpin(self, tenant: str, pin_id: str, timeout_s: float | None) -> None:
        """Ends a pin of any of the models. Raises the errors of `SchedulerCalls.unpin`."""
        await _first_found([partial(each.replicas.calls.unpin, tenant, pin_id, timeout_s=timeout_s) for each in self])


async def _first_found(calls: Sequence[Callable[[], Awaitable[Found]]]) -> Found:
    """The value of the first call that raises no error. If all do, raises the first error that is not NotFound, so that
    the caller tries again, or else NotFound."""
    errors: list[QuireError] = []
    for call in calls:
        try:
            return await call()
        except QuireError as error:
            errors.append(error)
    raise next((each for each in errors if not isinstance(each, NotFound)), errors[0])
