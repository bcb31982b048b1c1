"""The call that makes a response: its request, the writer of its answer, and the data to continue it elsewhere."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from gateway.api.answers import OPENAI, ErrorAnswer, as_json
from gateway.api.body import validated
from gateway.api.fields import Conversation, Names
from gateway.api.respond import Call, FrontEnd, Shaper
from gateway.api.responses.answers import CancelledResponse, CompactedResponse, CompactionItem
from gateway.api.responses.read_response import (
    ITEM,
    CompactBody,
    InputBody,
    ResponseBody,
    conversation_of,
    names_of,
    options_of,
    references,
)
from gateway.api.responses.store import ResponseStore, StoredResponse, input_items, message_of, plain_message
from gateway.api.responses.write_response import QUEUED, ResponseHead, ResponseShaper, response_head
from gateway.auth.caller import current_caller
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import STREAMED_AND_REPEATED
from gateway.request.body_memory import HeldBody
from gateway.request.generator import Generator, Result
from gateway.types import ChatMessage, RequestOptions
from quire.rpc.errors import ResourceExhausted
from quire.runtime import clock, entropy

_API = "responses"
ID_PREFIX = "resp_"
# Limits of the responses that a connection remembers.
_MAX_RECENT = 32
_MAX_RECENT_CHARACTERS = 1 << 20
_SUMMARIZE = (
    "Summarize the conversation so far for an assistant that continues it and sees only your summary and the messages "
    "of the user: what was asked, what was done and found, what tools returned, what is still open. Write only that."
)


class ResponseCall(Call):
    """One response. Its id is the id of its request, by which it can be cancelled."""

    stream_form = STREAMED_AND_REPEATED

    def __init__(
        self,
        body: ResponseBody,
        model: str,
        store: ResponseStore,
        conversation: Conversation,
        recent: "RecentResponses | None" = None,
        *,
        generates: bool = True,
    ) -> None:
        """If this gateway cannot store responses, the `store` of the response is false. `recent` gets the response of a
        connection that remembers its responses. Without `generates` the prompt is computed, and there is no output."""
        self.id = f"{ID_PREFIX}{entropy.random_hex(16)}"
        self.streams = bool(body.stream)
        self._tenant = current_caller().tenant
        self._body = body
        self._store = store
        self._recent = recent
        self._generates = generates
        self._head = ResponseHead(
            self.id,
            int(clock.unix_s()),
            model,
            store.keeps_any and body.store is not False,
            is_background=bool(body.background),
        )
        self._shaper: ResponseShaper | None = None
        self._conversation = conversation
        self._stored: StoredResponse | None = None
        self.dialect = dataclasses.replace(OPENAI, names_events=True, error_event=self._error_event)

    @classmethod
    def read_back(cls, live: LiveRequest, store: ResponseStore) -> Self:
        """The call that began a durable stream. Raises NotFound if the stream belongs to another API."""
        return cls.of_kept(live.request.front_end, live.request.request_id, store)

    @classmethod
    def of_kept(cls, data: bytes, response_id: str, store: ResponseStore) -> Self:
        """Restores a call from the data of its `kept`. Raises NotFound if the data belongs to another API."""
        kept = FrontEnd.of(data, _API, response_id)
        body = validated(ResponseBody, kept.body)
        conversation = Conversation(
            [message_of(each) for each in kept.more["messages"]], "input", instructions=body.instructions
        )
        call = cls(body, kept.model, store, conversation)
        call.id, call._head = kept.id, dataclasses.replace(call._head, id=kept.id, created=kept.created)
        return call

    @property
    def conversation(self) -> Sequence[ChatMessage]:
        """The conversation that it answers, without instructions."""
        return self._conversation.messages

    @property
    def asked_model(self) -> str | None:
        """The name of the model in the body."""
        return self._body.model

    @property
    def runs_in_background(self) -> bool:
        return self._head.is_background

    @property
    def seed(self) -> int | None:
        """The seed in the body; None if absent."""
        return None if self._body.seed in (None, -1) else self._body.seed % 2**63

    def kept(self) -> bytes:
        """The data from which another gateway can run it."""
        return self._front_end_of([plain_message(each) for each in self._conversation.messages]).to_bytes(None)

    def first_state(self) -> CancelledResponse:
        """The response before its request is admitted."""
        return response_head(self._head, QUEUED)

    def _front_end(self) -> bytes:
        if not self._body.durable:
            return b""
        messages = [plain_message(each) for each in self._conversation.messages] if self._head.is_stored else []
        return self._front_end_of(messages).to_bytes()

    def _front_end_of(self, messages: list[dict[str, Any]]) -> FrontEnd:
        fields = self._body.model_dump(mode="json", by_alias=True, exclude_unset=True) | {"input": []}
        return FrontEnd(_API, self.id, self._head.created, self._head.model, fields, {"messages": messages})

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        options = options_of(self._body, self._conversation.prompt, self.id)
        if not self._generates:
            options.stopping.max_tokens = 1
        return [dataclasses.replace(options, durable=bool(self._body.durable), front_end=self._front_end())]

    def names(self, position: int) -> Names:
        return names_of(self._body, self._conversation)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> ResponseShaper:
        texts = generator.model.tokenizer.token_texts
        self._shaper = ResponseShaper(self._head, self._body, live[0], texts, self._keep, generates=self._generates)
        return self._shaper

    def _keep(self, response: Mapping[str, Any], answer: ChatMessage) -> None:
        messages = (*self._conversation.messages, *([answer] if self._generates else ()))
        if self._head.is_stored:
            self._stored = StoredResponse(as_json(response), messages)
        if self._recent is not None:
            self._recent.add(self.id, messages)

    async def keep(self) -> None:
        if self._stored is not None:
            await self._store.run(self._store.add, self._tenant, self.id, self._stored)

    def _error_event(self, answer: ErrorAnswer) -> Mapping[str, Any]:
        assert self._shaper is not None, "a stream begins with what the shaper writes"
        return self._shaper.error_event(answer)


class CompactCall(Call):
    """Summarizes a conversation: a response to the wish for a summary, written as a shorter conversation."""

    streams = False

    def __init__(self, body: CompactBody, model: str, store: ResponseStore, conversation: Conversation) -> None:
        self._compacted = conversation.messages
        asked = Conversation((*self._compacted, ChatMessage("user", _SUMMARIZE)), "input", body.instructions)
        fields = ResponseBody(input=[], model=body.model, store=False, reasoning=body.reasoning)
        self._response = ResponseCall(fields, model, store, asked)
        self.id = self._response.id

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        return await self._response.requests(generator)

    def names(self, position: int) -> Names:
        return self._response.names(position)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> Shaper:
        return _CompactShaper(await self._response.shaper(generator, live), self._compacted)


class _CompactShaper:
    def __init__(self, shaper: ResponseShaper, compacted: Sequence[ChatMessage]) -> None:
        self._shaper, self._compacted = shaper, compacted
        # A compaction is never a stream.
        self.begin, self.event, self.end = shaper.begin, shaper.event, shaper.end
        self.repeats_form = shaper.repeats_form

    def whole(self, results: Sequence[Result]) -> CompactedResponse:
        response = self._shaper.whole(results)
        number = response["id"].removeprefix(ID_PREFIX)
        texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
        asked = [each for each in input_items(response["id"], self._compacted) if each["type"] == "message"]
        summary: CompactionItem = {"type": "compaction", "id": f"cmp_{number}", "encrypted_content": "".join(texts)}
        return {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": [*(each for each in asked if each["role"] == "user"), summary],
            "usage": response["usage"],
        }


class RecentResponses:
    """The conversations of the newest responses of one connection, stored or not."""

    def __init__(self, hold: Callable[[], HeldBody]) -> None:
        """`hold` makes the memory that they are counted in."""
        self._conversations: OrderedDict[str, Sequence[ChatMessage]] = OrderedDict()
        self._hold = hold
        self._held = hold()

    def add(self, response_id: str, messages: Sequence[ChatMessage]) -> None:
        """Adds a response; forgets the oldest ones beyond the maximum number and the maximum size of all together, and
        all of them if there is no memory."""
        self._conversations[response_id] = messages
        while len(self._conversations) > _MAX_RECENT or self._num_characters > _MAX_RECENT_CHARACTERS:
            self._conversations.popitem(last=False)
        self.close()
        self._held = self._hold()
        try:
            self._held.add(self._num_characters)
        except ResourceExhausted:
            self._conversations.clear()

    def close(self) -> None:
        """Frees the memory."""
        self._held.release()

    def get(self, response_id: str | None) -> Sequence[ChatMessage] | None:
        return None if response_id is None else self._conversations.get(response_id)

    @property
    def _num_characters(self) -> int:
        # Conversations that continue each other share their messages.
        messages = {id(each): each for kept in self._conversations.values() for each in kept}.values()
        calls = sum(len(call.arguments) for each in messages for call in each.tool_calls)
        return calls + sum(len(each.content) + len(each.reasoning or "") for each in messages)


async def conversation_with(
    store: ResponseStore, body: InputBody, recent: RecentResponses | None = None
) -> Conversation:
    """The conversation of a body, with the items that it refers to. Raises InvalidArgument if they are neither stored
    nor `recent`."""
    tenant = current_caller().tenant
    earlier = None if recent is None else recent.get(body.previous_response_id)
    if earlier is None:
        earlier = await store.run(store.earlier_messages, tenant, body.previous_response_id)
    items: dict[str, Any] = {}
    if asked := references(body):
        items = await store.items(tenant, asked)
    return conversation_of(body, earlier, {name: ITEM.validate_python(item) for name, item in items.items()})
