"""What the contract knows and this version does not do. Asking for it is an error; it is never ignored."""

from gateway.request import RequestOptions
from quire.rpc.errors import FieldViolation


def unsupported_fields(request: RequestOptions) -> list[FieldViolation]:
    """The fields of a valid request that ask for it. A value that changes nothing is fine."""
    asked = {"durable": request.durable}
    return [FieldViolation(field, "is not supported by this version") for field, is_asked in asked.items() if is_asked]
