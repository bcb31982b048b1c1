"""Triton's client against the gRPC port: a whole text, then one as it comes.

usage: pip install 'tritonclient[grpc]', in an environment of its own: it asks for other versions than Quire does; then
       python examples/python/triton_client.py [HOST:PORT]
"""

import queue
import sys

import numpy as np
import tritonclient.grpc as triton

MODEL = "quire-tiny"
PARAMETERS = {"max_tokens": 24, "temperature": 0.0}


def tensor(name: str, value: str | bool) -> triton.InferInput:
    """An input of one element."""
    is_text = isinstance(value, str)
    made = triton.InferInput(name, [1], "BYTES" if is_text else "BOOL")
    made.set_data_from_numpy(np.array([value.encode()], dtype=object) if is_text else np.array([value]))
    return made


def main(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        prompt = tensor("text_input", "Once upon a time")
        whole = client.infer(MODEL, [prompt], parameters=PARAMETERS)
        print(whole.as_numpy("text_output")[0].decode())

        responses: queue.SimpleQueue = queue.SimpleQueue()
        client.start_stream(lambda result, error: responses.put(error or result))
        client.async_stream_infer(MODEL, [prompt, tensor("stream", True)], parameters=PARAMETERS)
        is_final = False
        while not is_final:
            response = responses.get(timeout=60)
            if isinstance(response, Exception):
                raise response
            print(response.as_numpy("text_output")[0].decode(), end="", flush=True)
            is_final = response.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
        print()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
