"""Errors of parts that all front ends share, in the words of one of them."""

from collections.abc import Callable

from gateway.requests.violations import summary
from quire.rpc.errors import FieldViolation, QuireError


def renamed(error: QuireError, name: Callable[[str], str]) -> QuireError:
    """The same error; `name` says what each field at fault is called by the caller.

    What is then said twice, as of two fields that the caller set by one, is said once.
    """
    violations = list(dict.fromkeys(FieldViolation(name(each.field), each.description) for each in error.violations))
    is_summary = bool(violations) and error.message == summary(error.violations)
    return type(error)(
        summary(violations) if is_summary else error.message,
        reason=error.reason,
        violations=violations,
        retry_after_ms=error.retry_after_ms,
        metadata=error.metadata,
    )
