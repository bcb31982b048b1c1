"""Model directories whose chat templates support tools and reasoning."""

import shutil
from pathlib import Path

from quire.model_files.model_source import resolve_model

HERMES_TEMPLATE = """\
{%- if tools %}<|system|>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Calls: <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|end|>
{%- endif %}
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.name is defined %}{{ message.name }}: {% endif %}
{%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
"""Like Qwen's template: tool calls in Hermes' format, and reasoning that the argument enable_thinking turns off."""


def write_chat_model(directory: Path, template: str = HERMES_TEMPLATE) -> Path:
    """The embedded model with another chat template, without its weights."""
    source = resolve_model(None)
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, directory / file.name)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory
