"""OpenVINO GenAI's continuous batching on the CPU, behind the part of OpenAI's API that `quire bench` calls.

Called as `python openvino_genai_server.py MODEL PORT [DRAFTS NGRAM]` by an interpreter that has openvino_genai, with a
model that `optimum-cli export openvino` wrote. With DRAFTS and NGRAM it looks up the last NGRAM tokens in the prompt,
and verifies DRAFTS tokens that followed them in a step. Prints one line when it is ready. It takes completions of token
ids, streamed; a chunk has no text, since detokenization is not compared.
"""

import json
import os
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import openvino
import openvino_genai as genai

MODEL_NAME = "openvino"


class Engine:
    """The pipeline, stepped by its own thread while there is work."""

    def __init__(self, model, lookup=None):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 4, 64, 2048
        scheduler.enable_prefix_caching = False
        threads = len(os.sched_getaffinity(0))
        hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
        self._lookup = lookup
        if lookup is not None:
            hints["prompt_lookup"] = True
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", hints)
        self._inbox = queue.Queue()
        self._num_requests = 0
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, token_ids, num_output_tokens, temperature, top_p):
        """Yields the numbers of new tokens as they come."""
        outbox = queue.Queue()
        self._inbox.put((token_ids, num_output_tokens, temperature, top_p, outbox))
        left = num_output_tokens
        while left > 0:
            num_new = outbox.get()
            left -= num_new
            yield num_new

    def _run(self):
        live = []
        while True:
            # Waits only if nothing runs.
            while not live or not self._inbox.empty():
                live.append(self._add(*self._inbox.get()))
            self._pipeline.step()
            for handle, outbox in live:
                while handle.can_read():
                    outbox.put(sum(len(output.generated_ids) for output in handle.read().values()))
            live = [(handle, outbox) for handle, outbox in live if not self._is_over(handle)]

    def _add(self, token_ids, num_output_tokens, temperature, top_p, outbox):
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_output_tokens
        config.ignore_eos, config.do_sample = True, temperature > 0
        if config.do_sample:
            config.temperature, config.top_p = temperature, top_p
        if self._lookup is not None:
            config.num_assistant_tokens, config.max_ngram_size = self._lookup
        prompt = openvino.Tensor(np.array([token_ids], dtype=np.int64))
        self._num_requests += 1
        return self._pipeline.add_request(self._num_requests, prompt, config), outbox

    @staticmethod
    def _is_over(handle):
        return handle.get_status() != genai.GenerationStatus.RUNNING


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine = None

    def do_GET(self):
        self._answer({"data": [{"id": MODEL_NAME, "owned_by": "openvino"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, num_output_tokens = body["prompt"], body.get("max_tokens", 16)
        sampling = body.get("temperature", 0.0), body.get("top_p", 1.0)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_output_tokens}
        if not body.get("stream"):
            if isinstance(prompt, list):
                sum(self.engine.generate(prompt, num_output_tokens, *sampling))
            self._answer({"choices": [{"index": 0, "text": ""}], "usage": usage})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in self.engine.generate(prompt, num_output_tokens, *sampling):
            self._event({"choices": [{"index": 0, "text": "", "finish_reason": None}]})
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, content):
        self._chunk(b"data: %s\n\n" % json.dumps(content).encode())

    def _chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    # All requests of a burst connect at once; the default of 5 resets the rest.
    request_queue_size = 1024


def main():
    model, port, *lookup = sys.argv[1:]
    Handler.engine = Engine(model, tuple(map(int, lookup)) or None)
    server = Server(("127.0.0.1", int(port)), Handler)
    print(f"ready http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
