"""Tensors of the protocol to values and back: BYTES and BOOL, as contents or raw."""

import struct
from collections.abc import Mapping, Sequence

from gateway.violations import Violations, shortened
from quire.inference import open_inference_pb2 as pb

Value = bytes | bool
InputTensor = pb.ModelInferRequest.InferInputTensor

_SIZE = struct.Struct("<I")
_CONTENTS = {"BYTES": "bytes_contents", "BOOL": "bool_contents"}


def read_inputs(request: pb.ModelInferRequest, datatypes: Mapping[str, str]) -> dict[str, list[Value]]:
    """The elements of each input by its name. `datatypes` has all inputs that there are.

    Raises:
        InvalidArgument: an input is unknown, twice there, of another datatype, or has not what its shape says.
    """
    violations = Violations()
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        violations.add("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
        violations.raise_if_any()
    found: dict[str, list[Value]] = {}
    for position, tensor in enumerate(request.inputs):
        field = f"inputs[{position}]"
        if tensor.name in found:
            violations.add(f"{field}.name", f'is "{shortened(tensor.name)}" a second time')
        elif _check_head(violations, field, tensor, datatypes):
            values = _raw_values(tensor.datatype, raw[position]) if raw else _typed_values(tensor)
            _check_shape(violations, field, tensor, values)
            found[tensor.name] = values or []
    violations.raise_if_any()
    return found


def add_output(
    response: pb.ModelInferResponse, name: str, datatype: str, values: Sequence[bytes | int], *, raw: bool
) -> None:
    """Adds a tensor of shape [number of values] and datatype BYTES or UINT32."""
    tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if raw:
        response.raw_output_contents.append(b"".join(map(_raw_element, values)))
    elif datatype == "BYTES":
        tensor.contents.bytes_contents.extend(value for value in values if isinstance(value, bytes))
    else:
        tensor.contents.uint_contents.extend(value for value in values if isinstance(value, int))


def _check_head(violations: Violations, field: str, tensor: InputTensor, datatypes: Mapping[str, str]) -> bool:
    expected = datatypes.get(tensor.name)
    if expected is None:
        known = ", ".join(datatypes)
        violations.add(f"{field}.name", f'is "{shortened(tensor.name)}"; the inputs of this model are {known}')
    elif tensor.datatype != expected:
        violations.add(
            f"{field}.datatype", f'is "{shortened(tensor.datatype)}"; {tensor.name} is a tensor of {expected}'
        )
    else:
        return True
    return False


def _check_shape(violations: Violations, field: str, tensor: InputTensor, values: Sequence[Value] | None) -> None:
    """The shape is [N] or [N, 1], and there are N values; `values` is None where they cannot be read."""
    shape = list(tensor.shape)
    if len(shape) not in (1, 2) or shape[0] < 1 or shape[1:] not in ([], [1]):
        violations.add(f"{field}.shape", f"is {shortened(str(shape))}; it must be [N] or [N, 1] with N of at least 1")
    elif values is None:
        violations.add(f"{field}", f"has raw contents that are no elements of {tensor.datatype}")
    elif len(values) != shape[0]:
        violations.add(f"{field}.shape", f"is {shape}, of {shape[0]:,} elements; {len(values):,} came")


def _typed_values(tensor: InputTensor) -> list[Value]:
    return list(getattr(tensor.contents, _CONTENTS[tensor.datatype]))


def _raw_values(datatype: str, data: bytes) -> list[Value] | None:
    """None where the bytes are no elements of that datatype."""
    if datatype == "BOOL":
        return [byte != 0 for byte in data]
    values: list[Value] = []
    position = 0
    while position < len(data):
        start = position + _SIZE.size
        if start > len(data):
            return None
        (size,) = _SIZE.unpack_from(data, position)
        position = start + size
        if position > len(data):
            return None
        values.append(data[start:position])
    return values


def _raw_element(value: bytes | int) -> bytes:
    return _SIZE.pack(value) if isinstance(value, int) else _SIZE.pack(len(value)) + value
