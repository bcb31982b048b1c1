"""OpenVINO GenAI's continuous batching on the CPU, behind a part of OpenAI's API that `quire bench` and `quire torture`
call.

Called as `python openvino_genai_server.py MODEL PORT [DRAFTS NGRAM]` by an interpreter that has openvino_genai, with a
model that `optimum-cli export openvino` wrote. With DRAFTS and NGRAM it looks up the last NGRAM tokens in the prompt,
and verifies DRAFTS tokens that followed them in a step. Prints one line when it is ready. Completions of token ids have
`max_tokens` tokens and no text, since detokenization is not compared; completions of a text and chats have both text
and end. Other fields that change an answer are refused.
"""

import contextlib
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
_ENDS = {genai.GenerationFinishReason.STOP: "stop", genai.GenerationFinishReason.LENGTH: "length"}
_UNKNOWN = "n", "tools", "response_format", "top_logprobs"


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

        self.tokenizer = self._pipeline.get_tokenizer()
        # Where two threads are the first to read `data`, at the same time, both may wait forever (openvino 2026.4).
        _ = self.tokenizer.encode("").input_ids.data

    def generate(self, prompt, **settings):
        """Yields token ids, their log probabilities and the reason of the end, as they come; a string is encoded.
        Cancels the request if the caller goes away."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt).input_ids
        else:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        config = genai.GenerationConfig()
        for name, value in settings.items():
            setattr(config, name, value)
        if self._lookup is not None:
            config.num_assistant_tokens, config.max_ngram_size = self._lookup
        outbox, has_left, end = queue.Queue(), threading.Event(), genai.GenerationFinishReason.NONE
        self._inbox.put((ids, config, outbox, has_left))
        try:
            while end == genai.GenerationFinishReason.NONE:
                output = outbox.get()
                end = output.finish_reason
                yield output.generated_ids, output.generated_log_probs, _ENDS.get(end)
        finally:
            has_left.set()

    def _run(self):
        live = []
        while True:
            # Waits only if nothing runs.
            while not live or not self._inbox.empty():
                live.append(self._add(*self._inbox.get()))
            self._pipeline.step()
            for handle, outbox, has_left in live:
                while handle.can_read():
                    outbox.put(*handle.read().values())
                if has_left.is_set():
                    handle.cancel()
            live = [each for each in live if not self._is_over(each[0])]

    def _add(self, ids, config, outbox, has_left):
        self._num_requests += 1
        return self._pipeline.add_request(self._num_requests, ids, config), outbox, has_left

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
        if unknown := [name for name in _UNKNOWN if name in body]:
            self._answer({"error": {"message": f"{unknown[0]} is not supported", "code": "unsupported"}}, 400)
            return
        is_chat, max_tokens = "messages" in body, body.get("max_tokens", 16)
        prompt = self.engine.tokenizer.apply_chat_template(body["messages"], True) if is_chat else body["prompt"]
        settings = {"max_new_tokens": max_tokens, "logprobs": 1}
        if not isinstance(prompt, str):
            settings |= {"min_new_tokens": max_tokens, "ignore_eos": True}
        if body.get("temperature", 0.0) > 0:
            settings |= {"do_sample": True, "temperature": body["temperature"], "top_p": body.get("top_p", 1.0)}
            settings |= {"rng_seed": body["seed"]} if "seed" in body else {}
        outputs = self._choices(prompt, settings, is_chat, "logprobs" in body)
        if not body.get("stream"):
            self._answer(self._whole(list(outputs), is_chat))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.closing(outputs):
            for event in outputs:
                self._event(event)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _choices(self, prompt, settings, is_chat, has_logprobs):
        """Yields the events of a stream; the last one has the usage."""
        decode, ids, said = self.engine.tokenizer.decode, [], ""
        for new, logprobs, end in self.engine.generate(prompt, **settings):
            ids += new
            text = decode(ids) if isinstance(prompt, str) else ""
            if end is None and text.endswith("\N{REPLACEMENT CHARACTER}"):
                text = said
            piece, said = text[len(said) :], text
            choice = {
                "index": 0,
                "finish_reason": end,
                **({"delta": {"content": piece}} if is_chat else {"text": piece}),
            }
            if has_logprobs:
                choice["logprobs"] = {"token_logprobs": logprobs}
            yield {"choices": [choice]}
        prompt_ids = self.engine.tokenizer.encode(prompt).input_ids.data[0] if isinstance(prompt, str) else prompt
        counts = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
        yield {"choices": [], "usage": {**counts, "total_tokens": len(prompt_ids) + len(ids)}}

    @staticmethod
    def _whole(events, is_chat):
        choices = [event["choices"][0] for event in events[:-1]]
        text = "".join(each["delta"]["content"] if is_chat else each["text"] for each in choices)
        content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {"index": 0, "finish_reason": choices[-1]["finish_reason"], **content}
        return {"choices": [choice], "usage": events[-1]["usage"]}

    def _event(self, content):
        self._chunk(b"data: %s\n\n" % json.dumps(content).encode())

    def _chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    # All requests of a burst connect at once; the default of 5 resets the rest.
    request_queue_size = 1024

    def handle_error(self, request, client_address):
        """A client that goes away is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def main():
    model, port, *lookup = sys.argv[1:]
    Handler.engine = Engine(model, tuple(map(int, lookup)) or None)
    server = Server(("127.0.0.1", int(port)), Handler)
    print(f"ready http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
