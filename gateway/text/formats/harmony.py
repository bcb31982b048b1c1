"""The format of GPT-OSS: messages of the channels analysis (reasoning), final (content) and commentary (calls)."""

import re
from collections.abc import Sequence

from gateway.text.formats.parser import CallIds, CallParser, OfferedTools, Reading
from gateway.text.formats.scanning import first_marker, held_length

ANALYSIS = "<|channel|>analysis<|message|>"
END = "<|end|>"
AFTER_ANALYSIS = f"{END}<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
_MAX_HEADER = 512
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]+)")


class HarmonyParser(CallParser):
    """Parses the text that follows <|start|>assistant in the prompt.

    A message consists of a header with its channel and its recipient, <|message|>, its text, and an end token. Text
    without a header is content, and so is a message to a tool that was not offered.
    """

    tokens: Sequence[str] = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)

    def __init__(self, tools: OfferedTools, call_ids: CallIds, *, in_analysis: bool = False) -> None:
        """`in_analysis`: the prompt ends with the header of the reasoning."""
        super().__init__(tools, call_ids)
        self._in_header = not in_analysis
        self._channel = "analysis"
        self._in_call = False

    @property
    def is_reasoning(self) -> bool:
        return not self._in_header and self._channel == "analysis"

    def _read(self) -> Reading[None]:
        while True:
            if self._in_header:
                yield from self._read_header()
            yield from self._read_text()

    def _read_header(self) -> Reading[None]:
        while (end := self._rest.find(_MESSAGE, 0, _MAX_HEADER)) < 0:
            if len(self._rest) >= _MAX_HEADER or self._is_last:
                break
            yield
        self._in_header = False
        self._in_call, self._channel = False, "final"
        header = self._rest if end < 0 else self._rest[:end]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if end < 0:
            if self._is_last and channel is not None and self._may_be_offered(recipient):
                # The text ends within a header.
                self._consume(len(self._rest))
            return
        if recipient is not None and recipient.group(1) in self._tools:
            self._in_call = True
            self._open_call(recipient.group(1))
        elif recipient is not None or channel is None:
            # An unknown header: it and its text are content.
            return
        else:
            self._channel = channel.group(1)
        self._consume(end + len(_MESSAGE))

    def _may_be_offered(self, recipient: re.Match[str] | None) -> bool:
        return recipient is None or any(tool.startswith(recipient.group(1)) for tool in self._tools)

    def _read_text(self) -> Reading[None]:
        marks = (*_ENDS, _MESSAGE) if self._channel == "final" else _ENDS
        while (found := first_marker(self._rest, marks)) is None:
            held = 0 if self._is_last else held_length(self._rest, marks)
            self._deliver(self._consume(len(self._rest) - held))
            yield
        position, mark = found
        self._deliver(self._consume(position))
        self._consume(len(mark))
        self._in_header = mark != _MESSAGE

    def _deliver(self, text: str) -> None:
        if self._in_call:
            self._add_arguments(text)
        elif self._channel == "analysis":
            self._add(reasoning=text)
        else:
            self._add(text=text)
