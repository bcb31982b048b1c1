"""The model of a scripted server, as files: its tokens are bytes, and its chat template writes a conversation as JSON,
so that a scheduler can read it from the tokens of a prompt."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.constraints.tokens import byte_level_alphabet
from quire.testing.rules import Answer, Message, ToolCall

TEXT, VECTORS = "scripted", "scripted-embeddings"
"""Names of the two models: answers of text, and vectors."""
TOOL_FORMAT, REASONING_FORMAT = "hermes", "qwen3"
END = 256
"""The token that ends an answer; lower ids are bytes."""
MAX_TOKENS = 1 << 21
_END_TEXT = "<|end of the scripted answer|>"
# Behind the JSON stand calls and reasoning as the model writes them, by which the gateway recognises the formats.
_TEMPLATE = """\
{{ {"messages": messages, "tools": tools} | tojson }}
{%- for message in messages %}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{% endfor %}"""
_CONFIG = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": END + 1}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_ARCHITECTURES = {TEXT: ("LlamaForCausalLM", "llama"), VECTORS: ("BertModel", "bert")}


def architecture_of(name: str) -> str:
    """The architecture of a model, as its config.json has it."""
    return _ARCHITECTURES[name][0]


def write_model(directory: Path, name: str) -> Path:
    """Writes a model's files, except weights, to a new directory of its name. Returns that."""
    directory /= name
    directory.mkdir()
    architecture, model_type = _ARCHITECTURES[name]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "max_position_embeddings": MAX_TOKENS,
        "eos_token_id": END,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": END, "content": _END_TEXT, "special": True} | dict.fromkeys(_FLAGS, False)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {**byte_level_alphabet()}, "merges": []},
    }
    files = {
        "config.json": config | _CONFIG,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"eos_token": _END_TEXT} | ({"chat_template": _TEMPLATE} if name == TEXT else {}),
    }
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content), encoding="utf-8")
    return directory


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation, the names of the tools that it offers, and whether its answer begins in the reasoning."""

    messages: Sequence[Message]
    tools: Sequence[str] = ()
    has_begun_reasoning: bool = False


def read_prompt(token_ids: Sequence[int]) -> Prompt:
    """The conversation in a prompt. A prompt that is no conversation is one message of the role user."""
    text = bytes(each for each in token_ids if each < END).decode(errors="replace")
    try:
        content, _ = json.JSONDecoder().raw_decode(text)
        messages = [_message(each) for each in content["messages"]]
        tools = [each["function"]["name"] for each in content["tools"] or []]
        return Prompt(messages, tools, text.rstrip().endswith("<think>"))
    except (ValueError, LookupError, TypeError):
        return Prompt([Message("user", text)])


def _message(content: dict[str, Any]) -> Message:
    calls = [
        ToolCall(each["function"]["name"], each["function"]["arguments"]) for each in content.get("tool_calls") or []
    ]
    text = content.get("content") or ""
    return Message(content["role"], text, calls, content.get("name"), content.get("tool_call_id"))


def answer_texts(answer: Answer, *, has_begun_reasoning: bool) -> list[str]:
    """The pieces of an answer as the model writes them."""
    calls = [
        json.dumps({"name": each.name, "arguments": each.arguments}, ensure_ascii=False) for each in answer.tool_calls
    ]
    begin = "" if has_begun_reasoning else "<think>\n"
    return [
        *([f"{begin}{answer.reasoning}\n</think>\n\n"] if answer.reasoning or has_begun_reasoning else []),
        *answer.streamed,
        *(f"\n<tool_call>\n{each}\n</tool_call>" for each in calls),
    ]
