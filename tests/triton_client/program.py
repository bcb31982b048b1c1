"""Makes calls with Triton's own Python client, one a line: JSON in on stdin, JSON out on stdout.

It is run by the environment that has that client and imports nothing of the project. A call is
{"call": NAME, ...arguments}; its answer is {"result": ...} or {"error": {"message": TEXT, "status": TEXT or null}}.
"""

import json
import queue
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tritonclient.grpc as triton

_TIMEOUT_S = 20.0
_DATATYPES = {str: ("BYTES", object), bool: ("BOOL", bool), int: ("INT32", np.int32)}


def main(url: str, lines: Iterable[str]) -> None:
    for line in lines:
        print(json.dumps(_answer(url, **json.loads(line))), flush=True)


def _answer(url: str, call: str, **arguments: Any) -> dict[str, Any]:
    try:
        return {"result": _CALLS[call](url, **arguments)}
    except triton.InferenceServerException as error:
        return {"error": _error(error)}


def _error(error: triton.InferenceServerException) -> dict[str, str | None]:
    return {"message": error.message(), "status": error.status()}


def _simple(url: str, method: str, **arguments: Any) -> Any:
    """A call that takes and answers plain values: the client's method of that name."""
    with triton.InferenceServerClient(url) as client:
        return getattr(client, method)(client_timeout=_TIMEOUT_S, **arguments)


def _infer(url: str, timeout_s: float = _TIMEOUT_S, **asked: Any) -> dict[str, Any]:
    with triton.InferenceServerClient(url) as client:
        return _shown(client.infer(**_inference(**asked), client_timeout=timeout_s))


def _stream(
    url: str, requests: list[dict[str, Any]], headers: dict[str, str] | None = None, empty_final: bool = False
) -> list[dict[str, Any]]:
    """All responses to the requests of one stream, in the order of their coming."""
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: came.put(error or result), headers=headers, stream_timeout=_TIMEOUT_S)
        for asked in requests:
            client.async_stream_infer(**_inference(**asked), enable_empty_final_response=empty_final)
        client.stop_stream()
    return [_response(came.get()) for _ in range(came.qsize())]


def _response(response: Any) -> dict[str, Any]:
    return {"error": _error(response)} if isinstance(response, Exception) else _shown(response)


def _inference(
    inputs: dict[str, list[Any]], outputs: list[str] | None = None, model_name: str = "quire-tiny", **options: Any
) -> dict[str, Any]:
    """The arguments of the client's own methods; the type of its first element gives a tensor's datatype."""
    asked = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]
    tensors = [_tensor(name, values) for name, values in inputs.items()]
    return {"model_name": model_name, "inputs": tensors, "outputs": asked, **options}


def _tensor(name: str, values: list[Any]) -> triton.InferInput:
    datatype, dtype = _DATATYPES[type(values[0])]
    tensor = triton.InferInput(name, [len(values)], datatype)
    elements = [value.encode() if isinstance(value, str) else value for value in values]
    tensor.set_data_from_numpy(np.array(elements, dtype=dtype))
    return tensor


def _shown(result: triton.InferResult) -> dict[str, Any]:
    response = result.get_response()
    return {
        "id": response.id,
        "model_name": response.model_name,
        "parameters": {name: value.bool_param for name, value in response.parameters.items()},
        "outputs": {output.name: _values(result.as_numpy(output.name)) for output in response.outputs},
    }


def _values(array: Any) -> list[Any]:
    return [value.decode() if isinstance(value, bytes) else value for value in array.tolist()]


_CALLS: dict[str, Callable[..., Any]] = {
    "simple": _simple,
    "infer": _infer,
    "stream": _stream,
}

if __name__ == "__main__":
    main(sys.argv[1], sys.stdin)
