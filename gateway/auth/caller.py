"""Who a call comes from. It travels with the call's task, as its deadline does: no front end can forget to pass it on.

Where a call enters, its caller is set, also while authentication is off; what runs for the call asks for it. Code that
runs outside of any call has no caller, and asking for one there is an error.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from gateway.auth.account import Account, Limits
from quire.rpc.errors import FieldViolation, PermissionDenied

DEFAULT_TENANT = "default"
HIGHEST_PRIORITY = 100

_current: ContextVar["Caller"] = ContextVar("caller")


@dataclass(frozen=True, slots=True)
class Access:
    """What a key allows.

    Attributes:
        models: The models that may be used; None is all.
        priority: The priority of requests that name none.
        max_priority: The highest that a request may name.
        may_pin: Whether prefixes may be pinned.
        is_operator: Whether what concerns the deployment as a whole is shown: replicas and metrics.
    """

    models: frozenset[str] | None = None
    priority: int = 0
    max_priority: int = 0
    may_pin: bool = False
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of one key, or anyone where authentication is off.

    Attributes:
        tenant: Whose cached prefixes, request ids and pins it shares.
        access: What it may do.
        account: What it has used.
    """

    tenant: str
    access: Access
    account: Account

    def visible(self, model: str) -> str | None:
        """The model's name, or None where this caller is to be told that there is no such model."""
        models = self.access.models
        return model if models is None or model in models else None

    def priority_of(self, asked: int | None, sign: Literal[1, -1] = 1) -> int:
        """The priority of a request. Raises PermissionDenied when it asks for more than the key allows.

        `sign` times a priority is how the caller writes it.
        """
        if asked is None:
            return self.access.priority
        with self.account.counting_refusals():
            self._check_priority(asked, sign)
        return asked

    def check_may_pin(self) -> None:
        """Raises PermissionDenied when the key does not allow it."""
        with self.account.counting_refusals():
            if not self.access.may_pin:
                raise PermissionDenied("this API key does not allow to pin prefixes", reason="PINNING_NOT_ALLOWED")

    def _check_priority(self, asked: int, sign: Literal[1, -1]) -> None:
        highest = self.access.max_priority
        if asked > highest:
            bound = "at most" if sign == 1 else "at least"
            description = f"is {sign * asked}; this API key allows {bound} {sign * highest}"
            raise PermissionDenied(
                f"priority {description}",
                reason="PRIORITY_NOT_ALLOWED",
                violations=[FieldViolation("priority", description)],
            )


def anyone() -> Caller:
    """Who calls where authentication is off: allowed everything, limited in nothing."""
    access = Access(max_priority=HIGHEST_PRIORITY, may_pin=True, is_operator=True)
    return Caller(DEFAULT_TENANT, access, Account(Limits(), time.monotonic))


def current_caller() -> Caller:
    """The caller of the call that runs. Raises LookupError outside of calls."""
    return _current.get()


def set_caller(caller: Caller) -> None:
    """Says who calls, in the task that runs the call and in those that it starts."""
    _current.set(caller)
