"""Tensors of the protocol, as contents or raw: BYTES and BOOL are read, BYTES, UINT32 and FP32 are written."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.request.violations import Violations, shortened
from quire.inference import open_inference_pb2 as pb

Value = bytes | bool
Element = bytes | int | float
InputTensor = pb.ModelInferRequest.InferInputTensor
OutputTensor = pb.ModelInferRequest.InferRequestedOutputTensor

MAX_ELEMENTS = 1024
"""Of an input. Each prompt is a request of its own."""

_SIZE = struct.Struct("<I")
_CONTENTS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "UINT32": "uint_contents",
    "FP32": "fp32_contents",
}
# Parameters of a tensor that would change its elements. Others only describe it.
_REFUSED = {
    "shared_memory_region": "is set; shared memory is not supported, send elements in the message",
    "classification": "is set; the outputs of this model are not classes",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input.

    Attributes:
        field: Its path in the request.
        contents: The path of the list of its elements.
        values: Its elements, of the Python type of its datatype.
    """

    field: str
    contents: str
    values: Sequence[Value]

    def element(self, position: int) -> str:
        """The path of one of its elements in the request."""
        return f"{self.contents}[{position}]"


def read_inputs(request: pb.ModelInferRequest, datatypes: Mapping[str, str]) -> dict[str, Tensor]:
    """The inputs by name. `datatypes` has all inputs of the model.

    Raises:
        InvalidArgument: an input is unknown or repeated, or its datatype or shape does not fit.
    """
    violations = Violations()
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        violations.add("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
        violations.raise_if_any()
    found: dict[str, Tensor] = {}
    for position, tensor in enumerate(request.inputs):
        if violations.are_enough:
            break
        field = f"inputs[{position}]"
        if tensor.name in found:
            violations.add(f"{field}.name", f'is "{shortened(tensor.name)}" a second time')
        elif _check_head(violations, field, tensor, datatypes):
            contents = f"raw_input_contents[{position}]" if raw else f"{field}.contents.{_CONTENTS[tensor.datatype]}"
            values = _raw_values(tensor, raw[position]) if raw else _typed_values(tensor)
            _check_shape(violations, field, tensor, values, contents)
            found[tensor.name] = Tensor(field, contents, values or [])
    violations.raise_if_any()
    return found


def check_tensor_parameters(violations: Violations, field: str, tensor: InputTensor | OutputTensor) -> None:
    for name, description in _REFUSED.items():
        if name in tensor.parameters:
            violations.add(f'{field}.parameters["{name}"]', description)


def add_output(
    response: pb.ModelInferResponse, name: str, datatype: str, values: Sequence[Element], *, raw: bool
) -> None:
    """Adds a tensor of shape [number of values] and datatype BYTES, UINT32 or FP32."""
    tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if raw:
        response.raw_output_contents.append(b"".join(map(_RAW_ELEMENTS[datatype], values)))
    else:
        getattr(tensor.contents, _CONTENTS[datatype]).extend(values)


def _check_head(violations: Violations, field: str, tensor: InputTensor, datatypes: Mapping[str, str]) -> bool:
    check_tensor_parameters(violations, field, tensor)
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


def _check_shape(
    violations: Violations, field: str, tensor: InputTensor, values: Sequence[Value] | None, contents: str
) -> None:
    """The shape is [N] or [N, 1], and there are N values; `values` is None where they cannot be read."""
    shape = list(tensor.shape)
    if values is not None and len(values) > MAX_ELEMENTS:
        violations.add(
            contents, f"has more than {MAX_ELEMENTS:,} elements, which is the max; send fewer prompts at once"
        )
    elif len(shape) not in (1, 2) or shape[0] < 1 or shape[1:] not in ([], [1]):
        violations.add(f"{field}.shape", f"is {shortened(str(shape))}; it must be [N] or [N, 1] with N of at least 1")
    elif values is None:
        violations.add(contents, f"is not a sequence of elements of {tensor.datatype}")
    elif len(values) != shape[0]:
        violations.add(f"{field}.shape", f"is {shape}, of {shape[0]:,} elements; {len(values):,} came in {contents}")


def _typed_values(tensor: InputTensor) -> Sequence[Value]:
    return getattr(tensor.contents, _CONTENTS[tensor.datatype])


def _raw_values(tensor: InputTensor, data: bytes) -> list[Value] | None:
    """None where the bytes are not elements of the tensor's datatype. Reads at most one element more than allowed."""
    most = MAX_ELEMENTS + 1
    if tensor.datatype == "BOOL":
        return [byte != 0 for byte in data[:most]]
    values: list[Value] = []
    position = 0
    while position < len(data) and len(values) < most:
        start = position + _SIZE.size
        if start > len(data):
            return None
        (size,) = _SIZE.unpack_from(data, position)
        position = start + size
        if position > len(data):
            return None
        values.append(data[start:position])
    return values


def _raw_bytes(value: bytes) -> bytes:
    return _SIZE.pack(len(value)) + value


_RAW_ELEMENTS: Mapping[str, Callable[[Any], bytes]] = {
    "BYTES": _raw_bytes,
    "UINT32": struct.Struct("<I").pack,
    "FP32": struct.Struct("<f").pack,
}
