"""sentence-transformers behind the part of OpenAI's API that `python -m bench embeddings` calls.

Called as `python sentence_transformers_server.py MODEL PORT DTYPE`, where the dtype `openvino` runs the model by
OpenVINO instead of torch. Calls that wait are computed together. Prints one line when it is ready.
"""

import base64
import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from sentence_transformers import SentenceTransformer

INBOX = queue.Queue()


def run(model):
    while True:
        calls = [INBOX.get()]
        while not INBOX.empty():
            calls.append(INBOX.get())
        vectors = model.encode([text for texts, _ in calls for text in texts], batch_size=64, convert_to_numpy=True)
        for texts, outbox in calls:
            outbox.put(vectors[: len(texts)])
            vectors = vectors[len(texts) :]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_POST(self):
        texts, outbox = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"], queue.Queue()
        INBOX.put((texts, outbox))
        vectors = [base64.b64encode(each.astype("float32").tobytes()).decode() for each in outbox.get()]
        data = [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(vectors)]
        body = json.dumps({"object": "list", "data": data}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    _, path, port, dtype = sys.argv
    if dtype == "openvino":
        model = SentenceTransformer(path, backend="openvino", device="cpu")
    else:
        model = SentenceTransformer(path, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    threading.Thread(target=run, args=(model,), daemon=True).start()
    print("ready", flush=True)
    Server(("127.0.0.1", int(port)), Handler).serve_forever()
