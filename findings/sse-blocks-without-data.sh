#!/usr/bin/env bash
# Server-sent events: a block without data is no event (WHATWG HTML, "event stream interpretation"). openai-python
# 3.52.0 and openai's own JavaScript client 6.49.0 make one of it, each for other blocks, and raise in mid-answer.
#
# Expected: both skip all of these blocks.
# Seen: Python keeps `id` for ever, so a comment that ends its block (`: keep-alive`, blank line) fails as soon as any
# event had an id; a block of `retry` or `id` alone fails too. JavaScript skips those. Both fail on a block of `event`
# alone. Without ids both take comments. A server that numbers its events can send a comment as a part of the next
# block.
. "$(dirname "$0")/prelude.sh"
install openai==3.52.0
install_npm openai@6.49.0
cat >server.py <<'PY'
import http.server
import json

START = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
A, B = (
    "data: " + json.dumps(START | {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
    for text in "ab"
)
STREAMS = {
    "comment": f"{A}\n\n: keep-alive\n\n{B}\n\ndata: [DONE]\n\n",
    "comment-after-id": f"id: 1\n{A}\n\n: keep-alive\n\nid: 2\n{B}\n\ndata: [DONE]\n\n",
    "comment-in-block": f"id: 1\n{A}\n\n: keep-alive\nid: 2\n{B}\n\ndata: [DONE]\n\n",
    "retry": f"retry: 3000\n\n{A}\n\n{B}\n\ndata: [DONE]\n\n",
    "id": f"{A}\n\nid: 2\n\n{B}\n\ndata: [DONE]\n\n",
    "event": f"{A}\n\nevent: ping\n\n{B}\n\ndata: [DONE]\n\n",
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(STREAMS[self.path.split("/")[1]].encode())

    def log_message(self, *_):
        pass


def start():
    import threading

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port
PY
cat >case.mjs <<'JS'
import OpenAI from "openai";

console.error = () => {};
const [port, ...names] = process.argv.slice(2);
for (const name of names) {
  const client = new OpenAI({ baseURL: `http://127.0.0.1:${port}/${name}`, apiKey: "none", maxRetries: 0 });
  let seen = "";
  try {
    const messages = [{ role: "user", content: "a" }];
    const stream = await client.chat.completions.create({ model: "m", messages, stream: true });
    for await (const chunk of stream) seen += chunk.choices[0].delta.content;
  } catch (error) {
    seen += ` ${error.name}`;
  }
  console.log(`JavaScript ${name}: ${seen}`);
}
JS
cat >case.py <<'PY'
import subprocess

import openai
import server

port = server.start()
for name in server.STREAMS:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/{name}", api_key="none", max_retries=0)
    seen = ""
    try:
        messages = [{"role": "user", "content": "a"}]
        for chunk in client.chat.completions.create(model="m", messages=messages, stream=True):
            seen += chunk.choices[0].delta.content
    except ValueError as error:
        seen += f" {type(error).__name__}"
    print(f"Python {name}: {seen}", flush=True)
subprocess.run(["node", "case.mjs", str(port), *server.STREAMS], check=True)
PY
run env/bin/python case.py
expect <<'TEXT'
Python comment: ab
Python comment-after-id: a JSONDecodeError
Python comment-in-block: ab
Python retry:  JSONDecodeError
Python id: a JSONDecodeError
Python event: a JSONDecodeError
JavaScript comment: ab
JavaScript comment-after-id: ab
JavaScript comment-in-block: ab
JavaScript retry: ab
JavaScript id: ab
JavaScript event: a SyntaxError
TEXT
