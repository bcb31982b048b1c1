"""How a step is refused: the field, its value and the limit in one line, and the same as a BadRequest detail."""

from quire.rpc.errors import FieldViolation, InvalidArgument


def invalid(field: str, description: str) -> InvalidArgument:
    """The error for a field of a step, for example invalid("batch.rows", "holds row 3 twice")."""
    return InvalidArgument(f"{field} {description}", violations=[FieldViolation(field, description)])
