"""One call over any public front, with the same form of request and answer: gRPC, OpenAI's chats, completions and
responses, Anthropic's messages, and the Open Inference Protocol of KServe.

Parameters have the names of the gRPC contract; a front takes the parameters in `takes`.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc.aio
from google.protobuf.json_format import ParseDict

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2 as pb
from quire.inference import open_inference_pb2
from quire.rpc.errors import QuireError, from_rpc_error
from quire.testing.rules import STATUSES
from tests.support.gateway_process import RunningGateway

INFERENCE = "/inference.GRPCInferenceService/"

# Status codes of HTTP, as gRPC names them.
_STATUSES = {**STATUSES, 409: "ALREADY_EXISTS", 499: "CANCELLED"}
_SAMPLING = frozenset(common_pb2.SamplingParameters.DESCRIPTOR.fields_by_name)
_STOPPING = frozenset(common_pb2.StoppingParameters.DESCRIPTOR.fields_by_name)
_OUTPUT = frozenset(common_pb2.OutputOptions.DESCRIPTOR.fields_by_name)
_OF_CHATS = frozenset({"tools", "tool_choice", "schema"})
Headers = list[tuple[str, str]]
# Other values name a tool.
_CHOICES = frozenset({"required", "none", "auto"})


@contextlib.contextmanager
def _cancelling(call: Any) -> Iterator[Any]:
    """Cancels the call with its task: grpc.aio continues a call if headers come in the same turn of the loop."""
    try:
        yield call
    finally:
        call.cancel()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The failure of a call; a part is None if the front has no place for it."""

    status: str
    message: str
    reason: str | None = None
    field: str | None = None
    retry_after_s: float | None = None


@dataclass(slots=True)
class Answer:
    """An answer over any front.

    Attributes:
        pieces: The text as it came.
        calls: Name and arguments of each call of a tool.
        finish: "stop", "length" or "tool_calls".
        stop: The stop string or token that ended the text, if the front reports it.
        usage: Tokens of the prompt and of the output.
        logprobs: Log probabilities of the chosen tokens.
    """

    pieces: list[str] = field(default_factory=list)
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None
    usage: tuple[int, int] | None = None
    logprobs: list[float] = field(default_factory=list)
    refusal: Refusal | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reason(self) -> str | None:
        """The reason of the refusal."""
        return None if self.refusal is None else self.refusal.reason

    def add_text(self, text: str | None) -> None:
        if text:
            self.pieces.append(text)

    def add_to_call(self, index: int, name: str, arguments: str) -> None:
        if index == len(self.calls):
            self.calls.append(("", ""))
        self.calls[index] = self.calls[index][0] + name, self.calls[index][1] + arguments


class Front:
    """A front of one gateway."""

    name: ClassVar[str]
    takes: ClassVar[frozenset[str]]
    field_names: ClassVar[Mapping[str, str]] = {}
    """Names of fields in errors, if they differ from the gRPC contract's without its groups."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._gateway = gateway

    async def ask(
        self, text: Any = "hello", *, streams: bool = False, authorizations: Sequence[str] = (), **fields: Any
    ) -> Answer:
        """Calls with `text` as the prompt or as the user's message; for 30 tokens by default."""
        answer = Answer()
        headers = [("authorization", each) for each in authorizations]
        await self._ask(answer, text, {"max_tokens": 30} | fields, headers, streams=streams)
        return answer

    async def refused(self, text: Any = "hello", **options: Any) -> Refusal:
        """The failure of a call; AssertionError if it succeeds."""
        refusal = (await self.ask(text, **options)).refusal
        assert refusal is not None
        return refusal

    async def _ask(self, answer: Answer, text: Any, fields: dict[str, Any], headers: Headers, *, streams: bool) -> None:
        """Adds a response to the answer."""
        raise NotImplementedError

    def field_name(self, name: str) -> str:
        return self.field_names.get(name, name)


def _as_vllm(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters under vLLM's names; in vLLM lower priorities run earlier."""
    named = dict(fields)
    if "priority" in named:
        named["priority"] = -named["priority"]
    if "include_stop_string" in named:
        named["include_stop_str_in_output"] = named.pop("include_stop_string")
    if "include_special_tokens" in named:
        named["skip_special_tokens"] = not named.pop("include_special_tokens")
    return named


def _refusal_of(error: QuireError) -> Refusal:
    retry_after_s = None if error.retry_after_ms is None else error.retry_after_ms / 1000
    at_fault = error.violations[0].field if error.violations else None
    return Refusal(error.code.name, error.message, error.reason, at_fault, retry_after_s)


class _OfGrpc(Front):
    async def _ask(self, answer: Answer, text: Any, fields: dict[str, Any], headers: Headers, *, streams: bool) -> None:
        try:
            await self._read(answer, self._request(text, fields, streams=streams), tuple(headers))
        except grpc.aio.AioRpcError as failure:
            answer.refusal = _refusal_of(from_rpc_error(failure))

    def _request(self, text: Any, fields: dict[str, Any], *, streams: bool) -> Any:
        raise NotImplementedError

    async def _read(self, answer: Answer, request: Any, metadata: Any) -> None:
        raise NotImplementedError


class GrpcGenerate(_OfGrpc):
    name = "grpc"
    takes = _SAMPLING | _STOPPING | _OUTPUT | {"request_id", "priority", "model", "schema"}
    field_names: ClassVar[Mapping[str, str]] = (
        {each: f"sampling.{each}" for each in _SAMPLING}
        | {each: f"stopping.{each}" for each in _STOPPING}
        | {each: f"output.{each}" for each in _OUTPUT}
        | {"prompt": "text", "schema": "sampling.constraint.json_schema"}
    )
    _kinds: ClassVar[tuple[Any, Any]] = (pb.GenerateRequest, pb.GenerateStreamRequest)

    def _request(self, text: Any, fields: dict[str, Any], *, streams: bool) -> Any:
        return ParseDict(self._body(text, fields), self._kinds[streams]())

    async def _read(self, answer: Answer, request: Any, metadata: Any) -> None:
        method = type(request).__name__.removesuffix("Request")
        call = getattr(self._gateway.generation, method)(request, timeout=60, metadata=metadata)
        if method.endswith("Stream"):
            with _cancelling(call):
                async for response in call:
                    self._add_event(answer, response)
            return
        response = await call
        (sequence,) = response.sequences
        self._add_part(answer, sequence)
        answer.calls = [(each.name, each.arguments) for each in sequence.tool_calls]
        self._add_end(answer, sequence)
        answer.usage = response.usage.prompt_tokens, response.usage.generated_tokens

    def _body(self, text: Any, fields: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"text": text, "sampling": {}, "stopping": {}, "output": {}}
        for name, value in fields.items():
            groups = {"sampling": _SAMPLING, "stopping": _STOPPING, "output": _OUTPUT}
            group = next((group for group, names in groups.items() if name in names), None)
            if name == "schema":
                body["sampling"]["constraint"] = {"json_schema": json.dumps(value)}
            elif group is None:
                body[name] = value
            else:
                body[group][name] = value
        return body

    def _add_event(self, answer: Answer, response: Any) -> None:
        match response.WhichOneof("event"):
            case "chunk":
                self._add_part(answer, response.chunk)
                for call in response.chunk.tool_calls:
                    answer.add_to_call(call.index, call.name, call.arguments)
            case "finished":
                self._add_end(answer, response.finished)
            case "completed":
                usage = response.completed.usage
                answer.usage = usage.prompt_tokens, usage.generated_tokens

    @staticmethod
    def _add_part(answer: Answer, part: Any) -> None:
        answer.add_text(part.text)
        answer.reasoning += part.reasoning
        answer.logprobs += [each.chosen.logprob for each in part.logprobs]

    @staticmethod
    def _add_end(answer: Answer, end: Any) -> None:
        answer.finish = common_pb2.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_").lower()
        stops = [getattr(end, name) for name in ("stop_string", "stop_token_id") if end.HasField(name)]
        answer.stop = stops[0] if stops else None


class GrpcChat(GrpcGenerate):
    name = "grpc chat"
    takes = GrpcGenerate.takes | _OF_CHATS
    field_names: ClassVar[Mapping[str, str]] = dict(GrpcGenerate.field_names) | {
        "prompt": "messages",
        "schema": "response_format.json_schema",
    }
    _kinds: ClassVar[tuple[Any, Any]] = (pb.ChatRequest, pb.ChatStreamRequest)

    def _body(self, text: Any, fields: dict[str, Any]) -> dict[str, Any]:
        fields = dict(fields)
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        if "tools" in fields:
            tools = fields.pop("tools")
            chat["tools"] = [tool | {"parameters": json.dumps(tool["parameters"])} for tool in tools]
        if (choice := fields.pop("tool_choice", None)) is not None:
            modes = {"mode": f"TOOL_CHOICE_MODE_{choice.upper()}"}
            chat["tool_choice"] = modes if choice in _CHOICES else {"name": choice}
        if "schema" in fields:
            chat["response_format"] = {"json_schema": json.dumps(fields.pop("schema"))}
        body = super()._body(text, fields)
        del body["text"]
        return body | chat


class KServe(_OfGrpc):
    name = "kserve"
    takes = _SAMPLING | _STOPPING | {"priority", "logprobs", "schema", "model"}
    field_names: ClassVar[Mapping[str, str]] = {
        each: f'inputs[1].contents.bytes_contents[0]["{each}"]' for each in (*_SAMPLING, *_STOPPING, "priority")
    } | {
        "prompt": "inputs[0].contents.bytes_contents[0]",
        "schema": 'inputs[1].contents.bytes_contents[0]["guided_json"]',
        "logprobs": 'inputs[1].contents.bytes_contents[0]["logprobs"]',
        "model": "model_name",
    }
    _FLAGS = ("finish_reason", "num_input_tokens", "num_output_tokens")

    async def _read(self, answer: Answer, request: Any, metadata: Any) -> None:
        kinds = open_inference_pb2.ModelInferRequest, open_inference_pb2.ModelInferResponse
        if request.inputs[2].name != "stream":
            call = self._gateway.channel.unary_unary(
                INFERENCE + "ModelInfer", kinds[0].SerializeToString, kinds[1].FromString
            )
            self._add(answer, await call(request, timeout=60, metadata=metadata))
            return
        call = self._gateway.channel.stream_stream(
            INFERENCE + "ModelStreamInfer",
            kinds[0].SerializeToString,
            open_inference_pb2.ModelStreamInferResponse.FromString,
        )
        as_status = (*metadata, ("triton_grpc_error", "true"))
        with _cancelling(call(iter([request]), timeout=60, metadata=as_status)) as responses:
            async for response in responses:
                self._add(answer, response.infer_response)

    def _request(self, text: Any, fields: dict[str, Any], *, streams: bool) -> Any:
        fields = _as_vllm(fields)
        request = open_inference_pb2.ModelInferRequest(
            model_name=fields.pop("model", self._gateway.gateway._models.default.model.name)
        )
        if "schema" in fields:
            fields["guided_json"] = fields.pop("schema")
        for name, value in {"text_input": text, "sampling_parameters": json.dumps(fields)}.items():
            tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(value.encode())
        flag = "stream" if streams else "exclude_input_in_output"
        wanted = [*self._FLAGS, *(["logprobs"] if "logprobs" in fields else [])]
        for name in (flag, *(f"return_{each}" for each in wanted)):
            request.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
        return request

    @staticmethod
    def _add(answer: Answer, response: open_inference_pb2.ModelInferResponse) -> None:
        found: dict[str, Any] = {}
        for output in response.outputs:
            ((_, elements),) = output.contents.ListFields() or ((None, [b""]),)
            found[output.name] = elements[0].decode() if isinstance(elements[0], bytes) else elements[0]
        answer.add_text(found.get("text_output"))
        answer.finish = found.get("finish_reason") or answer.finish
        if "num_output_tokens" in found:
            # In a stream, each piece has its own number of tokens.
            before = 0 if answer.usage is None else answer.usage[1]
            answer.usage = found["num_input_tokens"], before + found["num_output_tokens"]
        for position in json.loads(found.get("logprobs") or "[]"):
            answer.logprobs.append(next(iter(position.values()))["logprob"])


class _OfHttp(Front):
    path: ClassVar[str]
    streaming: ClassVar[dict[str, Any]] = {"stream": True}
    """The fields of a call that streams."""

    async def _ask(self, answer: Answer, text: Any, fields: dict[str, Any], headers: Headers, *, streams: bool) -> None:
        body = self._body(text, fields) | (self.streaming if streams else {"stream": False})
        async with self._gateway.http.stream("POST", self.path, json=body, headers=headers) as response:
            if response.status_code == 200 and streams:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._add_event(answer, json.loads(line.removeprefix("data: ")))
                return
            data = json.loads(await response.aread())
        if response.status_code == 200:
            self._add_whole(answer, data)
        else:
            retry_after = response.headers.get("retry-after")
            status = _STATUSES[response.status_code]
            answer.refusal = self._refusal(status, data["error"], float(retry_after) if retry_after else None)

    def _body(self, text: Any, fields: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _add_whole(self, answer: Answer, data: dict[str, Any]) -> None:
        raise NotImplementedError

    def _add_event(self, answer: Answer, data: dict[str, Any]) -> None:
        raise NotImplementedError

    @staticmethod
    def _refusal(status: str, error: dict[str, Any], retry_after_s: float | None = None) -> Refusal:
        return Refusal(status, error["message"], error["code"].upper(), error["param"], retry_after_s)


class Completions(_OfHttp):
    name = "completions"
    path = "/v1/completions"
    streaming: ClassVar[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
    takes = GrpcGenerate.takes - {"beam_search", "constraint"}
    field_names: ClassVar[Mapping[str, str]] = {"schema": "response_format.json_schema.schema"}

    def _body(self, text: Any, fields: dict[str, Any]) -> dict[str, Any]:
        body = _as_vllm(fields) | {"prompt": text}
        if "schema" in body:
            described = {"name": "n", "schema": body.pop("schema")}
            body["response_format"] = {"type": "json_schema", "json_schema": described}
        return body

    def _add_whole(self, answer: Answer, data: dict[str, Any]) -> None:
        self._add_event(answer, data)

    def _add_event(self, answer: Answer, data: dict[str, Any]) -> None:
        if "error" in data:
            answer.refusal = self._refusal("", data["error"])
            return
        for choice in data["choices"]:
            self._add_choice(answer, choice)
            if choice["finish_reason"] is not None:
                answer.finish, answer.stop = choice["finish_reason"], choice.get("stop_reason")
        if data.get("usage") is not None:
            answer.usage = data["usage"]["prompt_tokens"], data["usage"]["completion_tokens"]

    def _add_choice(self, answer: Answer, choice: dict[str, Any]) -> None:
        answer.add_text(choice["text"])
        answer.logprobs += (choice.get("logprobs") or {"token_logprobs": []})["token_logprobs"]


class OpenAiChat(Completions):
    name = "chat completions"
    path = "/v1/chat/completions"
    takes = Completions.takes | _OF_CHATS
    field_names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages", "logprobs": "top_logprobs", "schema": "response_format.json_schema.schema"
    }  # fmt: skip

    def _body(self, text: Any, fields: dict[str, Any]) -> dict[str, Any]:
        body = super()._body(text, fields)
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if "logprobs" in fields:
            body |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        if "tools" in fields:
            body["tools"] = [{"type": "function", "function": tool} for tool in fields["tools"]]
        if fields.get("tool_choice") not in {None, *_CHOICES}:
            body["tool_choice"] = {"type": "function", "function": {"name": fields["tool_choice"]}}
        return body

    def _add_choice(self, answer: Answer, choice: dict[str, Any]) -> None:
        part = choice.get("message") or choice["delta"]
        answer.add_text(part.get("content"))
        answer.reasoning += part.get("reasoning_content") or ""
        for index, call in enumerate(part.get("tool_calls") or ()):
            function = call["function"]
            answer.add_to_call(call.get("index", index), function.get("name") or "", function["arguments"])
        answer.logprobs += [each["logprob"] for each in (choice.get("logprobs") or {"content": []})["content"]]


class Responses(_OfHttp):
    name = "responses"
    path = "/v1/responses"
    takes = _OF_CHATS | {"max_tokens", "temperature", "top_p", "logprobs", "model"}
    field_names: ClassVar[Mapping[str, str]] = {
        "prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "schema": "text.format"
    }  # fmt: skip

    def _body(self, text: Any, fields: dict[str, Any]) -> dict[str, Any]:
        body = {self.field_name(name): value for name, value in fields.items() if name != "schema"} | {"input": text}
        if "logprobs" in fields:
            body["include"] = ["message.output_text.logprobs"]
        if "schema" in fields:
            body["text"] = {"format": {"type": "json_schema", "name": "n", "schema": fields["schema"]}}
        if "tools" in fields:
            body["tools"] = [{"type": "function"} | tool for tool in fields["tools"]]
        if fields.get("tool_choice") not in {None, *_CHOICES}:
            body["tool_choice"] = {"type": "function", "name": fields["tool_choice"]}
        return body

    def _add_whole(self, answer: Answer, data: dict[str, Any]) -> None:
        for item in data["output"]:
            match item["type"]:
                case "function_call":
                    answer.calls.append((item["name"], item["arguments"]))
                case "reasoning":
                    answer.reasoning += item["content"][0]["text"]
                case "message":
                    self._add_text(answer, item["content"][0]["text"], item["content"][0]["logprobs"])
        self._add_end(answer, data)

    def _add_event(self, answer: Answer, data: dict[str, Any]) -> None:
        match data["type"]:
            case "response.output_text.delta":
                self._add_text(answer, data["delta"], data["logprobs"])
            case "response.reasoning_text.delta":
                answer.reasoning += data["delta"]
            case "response.output_item.added" if data["item"]["type"] == "function_call":
                answer.calls.append((data["item"]["name"], ""))
            case "response.function_call_arguments.delta":
                answer.add_to_call(len(answer.calls) - 1, "", data["delta"])
            case "response.completed" | "response.incomplete":
                self._add_end(answer, data["response"])
            case "error":
                answer.refusal = self._refusal("", data)

    @staticmethod
    def _add_text(answer: Answer, text: str, logprobs: list[dict[str, Any]]) -> None:
        answer.add_text(text)
        answer.logprobs += [each["logprob"] for each in logprobs]

    @staticmethod
    def _add_end(answer: Answer, response: dict[str, Any]) -> None:
        # Only the items tell the calls.
        whole = "tool_calls" if answer.calls else "stop"
        answer.finish = "length" if response["status"] == "incomplete" else whole
        answer.usage = response["usage"]["input_tokens"], response["usage"]["output_tokens"]


class Messages(_OfHttp):
    name = "messages"
    path = "/v1/messages"
    takes = _OF_CHATS | {"max_tokens", "temperature", "top_p", "top_k", "stop", "model"}
    field_names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "schema": "output_config.format",
    }

    def _body(self, text: Any, fields: dict[str, Any]) -> dict[str, Any]:
        body = {self.field_name(name): value for name, value in fields.items() if name != "schema"}
        body["messages"] = [{"role": "user", "content": text}]
        if "schema" in fields:
            body["output_config"] = {"format": {"type": "json_schema", "schema": fields["schema"]}}
        if "tools" in fields:
            body["tools"] = [
                {name: value for name, value in tool.items() if name != "parameters"}
                | {"input_schema": tool["parameters"]}
                for tool in fields["tools"]
            ]
        if (choice := fields.get("tool_choice")) is not None:
            kinds = {"required": {"type": "any"}, "none": {"type": "none"}, "auto": {"type": "auto"}}
            body["tool_choice"] = kinds.get(choice, {"type": "tool", "name": choice})
        return body

    def _add_whole(self, answer: Answer, data: dict[str, Any]) -> None:
        for block in data["content"]:
            self._add_block(answer, block, json.dumps(block.get("input")))
        self._add_end(answer, data, data["usage"])

    def _add_event(self, answer: Answer, data: dict[str, Any]) -> None:
        match data["type"]:
            case "content_block_start":
                self._add_block(answer, data["content_block"], "")
            case "content_block_delta":
                delta = data["delta"]
                if delta["type"] == "input_json_delta":
                    answer.add_to_call(len(answer.calls) - 1, "", delta["partial_json"])
                else:
                    self._add_block(answer, delta, "")
            case "message_delta":
                self._add_end(answer, data["delta"], data["usage"])
            case "error":
                answer.refusal = self._refusal("", data["error"])

    @staticmethod
    def _add_block(answer: Answer, block: dict[str, Any], arguments: str) -> None:
        answer.add_text(block.get("text"))
        answer.reasoning += block.get("thinking", "")
        if block["type"] == "tool_use":
            answer.calls.append((block["name"], arguments))

    @staticmethod
    def _add_end(answer: Answer, end: dict[str, Any], usage: dict[str, Any]) -> None:
        reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        answer.finish, answer.stop = reasons[end["stop_reason"]], end["stop_sequence"]
        answer.usage = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]

    @staticmethod
    def _refusal(status: str, error: dict[str, Any], retry_after_s: float | None = None) -> Refusal:
        return Refusal(status, error["message"], retry_after_s=retry_after_s)


FRONTS: tuple[type[Front], ...] = (
    GrpcGenerate, GrpcChat, Completions, OpenAiChat, Responses, Messages, KServe
)  # fmt: skip
CHATS = tuple(front for front in FRONTS if "tools" in front.takes)


def fronts_that_take(*fields: str) -> tuple[type[Front], ...]:
    return tuple(front for front in FRONTS if front.takes.issuperset(fields))
