"""What all later turns of a conversation begin with, as the chat template and the tokenizer make it."""

from collections.abc import Sequence

from gateway.model import ServedModel
from gateway.requests.request import ChatMessage
from quire.rpc.errors import InvalidArgument

# Two messages that share no character, one of which merges with a line break before it where the tokenizer does that.
_PROBES = ("a", "\n7")
_ASKED_ROLES = frozenset({"user", "tool"})


async def encode_chat_prefix(model: ServedModel, messages: Sequence[ChatMessage]) -> list[int]:
    """The token ids that the prompts of all conversations begin with that go on from these messages.

    Some templates write a message otherwise once others follow, and some write a system message only together with the
    first message of the user. So it is what two different continuations have in common, the messages' own prompt
    included where they can be asked as they are. A template that knows none of the roles of these continuations is
    taken at its word about the messages alone.

    Raises:
        InvalidArgument: the model has no template, or the template refuses the messages.
    """
    try:
        prompts = [await model.encode_chat(conversation) for conversation in _later(messages)]
    except InvalidArgument:
        return await model.encode_chat(messages, add_generation_prompt=False)
    prefix = prompts[0]
    for prompt in prompts[1:]:
        prefix = common_prefix(prefix, prompt)
    return prefix


def common_prefix(first: list[int], second: list[int]) -> list[int]:
    """The longest list that both begin with."""
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return first[:position]
    return min(first, second, key=len)


def _later(messages: Sequence[ChatMessage]) -> list[list[ChatMessage]]:
    """Conversations that begin with the messages and end with the user's turn."""
    if messages[-1].role not in _ASKED_ROLES:
        return [[*messages, ChatMessage("user", text)] for text in _PROBES]
    answered = [[*messages, ChatMessage("assistant", text), ChatMessage("user", "a")] for text in _PROBES]
    return [list(messages), *answered]
