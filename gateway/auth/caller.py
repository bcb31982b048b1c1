"""The caller of the current call, a context variable of the call's task, so front ends need not pass it on.

It is set when a call arrives, also if authentication is off. Outside of calls it is not set, and reading it raises.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from gateway.auth.quota import Account, Limits
from quire.rpc.errors import PermissionDenied
from quire.runtime import clock

DEFAULT_TENANT = "default"
HIGHEST_PRIORITY = 100
LOWEST_PRIORITY = -100
OWN_SITES = ("same-origin", "none")
"""Values of sec-fetch-site for this site's pages and for typed addresses; "same-site" is another port or subdomain."""

_current: ContextVar["Caller"] = ContextVar("caller")


@dataclass(frozen=True, slots=True)
class Access:
    """The permissions of a key.

    Attributes:
        models: The models that may be used; None means all.
        priority: The default priority of requests.
        max_priority: The highest priority that a request may set.
        may_pin: Whether prefixes may be pinned.
        is_operator: Whether it may read information about the whole deployment: replicas and metrics.
    """

    models: frozenset[str] | None = None
    priority: int = 0
    max_priority: int = 0
    may_pin: bool = False
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of one key, or any client if authentication is off.

    Attributes:
        tenant: Its tenant. Cached prefixes, request ids and pins are shared within a tenant.
        access: Its permissions.
        account: Its limits and usage.
        key_id: The id of the key; empty if authentication is off.
    """

    tenant: str
    access: Access
    account: Account
    key_id: str = ""

    def visible(self, model: str) -> str | None:
        """The model's name, or None if the caller may not use the model."""
        models = self.access.models
        return model if models is None or model in models else None

    def priority_of(self, asked: int | None, sign: Literal[1, -1] = 1) -> int:
        """The priority of a request that sets `asked`. Errors show `sign * asked`, the value in the caller's API.

        Raises:
            PermissionDenied: the priority is above the key's limit.
        """
        if asked is None:
            return self.access.priority
        highest = self.access.max_priority
        if asked <= highest:
            return asked
        bound = "at most" if sign == 1 else "at least"
        description = f"is {sign * asked}; this API key allows {bound} {sign * highest}"
        with self.account.counting_refusals():
            raise PermissionDenied.of_field("priority", description, reason="PRIORITY_NOT_ALLOWED")

    def check_may_pin(self) -> None:
        """Raises PermissionDenied if the key does not allow pins."""
        with self.account.counting_refusals():
            if not self.access.may_pin:
                raise PermissionDenied("this API key does not allow pinned prefixes", reason="PINNING_NOT_ALLOWED")


def check_is_operator(caller: Caller, what: str) -> None:
    """Raises PermissionDenied unless this caller may use `what`, which concerns the whole deployment."""
    if not caller.access.is_operator:
        raise PermissionDenied(f"{what} are for the API keys of operators", reason="OPERATORS_ONLY")


def anyone() -> Caller:
    """The caller if authentication is off: everything is allowed, nothing is limited."""
    access = Access(max_priority=HIGHEST_PRIORITY, may_pin=True, is_operator=True)
    return Caller(DEFAULT_TENANT, access, Account(Limits(), clock.monotonic))


def current_caller() -> Caller:
    """The caller of the current call. Raises LookupError outside of calls."""
    return _current.get()


def calling_tenant() -> str | None:
    """The tenant of the current call; None outside of calls, for work of the gateway itself."""
    caller = _current.get(None)
    return None if caller is None else caller.tenant


def current_tenant() -> str:
    """The tenant of the current call; the default tenant outside of calls."""
    return calling_tenant() or DEFAULT_TENANT


def set_caller(caller: Caller) -> None:
    """Sets the caller of the current task, and of tasks that it starts from now on."""
    _current.set(caller)
