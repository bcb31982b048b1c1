"""Fields of requests that vLLM or llama-cpp-python reads are read here, refused by name, or ignored on purpose."""

import ast
from pathlib import Path
from typing import Any

import pytest

from gateway.api.field_rule import Part
from gateway.api.generation_fields import CompletionBody
from gateway.api.openai.schemas import ChatBody
from gateway.api.responses.read_response import ResponseBody
from tests.real.packages import pypi

pytestmark = pytest.mark.real
_VLLM = "vllm/entrypoints/openai"
# The name in vLLM's sdist is of a module, in llama-cpp-python's of a class in one module.
REQUESTS: Any = (
    (ChatBody, "vllm", "0.33.0", f"{_VLLM}/chat_completion/protocol.py", "ChatCompletionRequest"),
    (CompletionBody, "vllm", "0.33.0", f"{_VLLM}/completion/protocol.py", "CompletionRequest"),
    (ResponseBody, "vllm", "0.33.0", f"{_VLLM}/responses/protocol.py", "ResponsesRequest"),
    (ChatBody, "llama-cpp-python", "0.3.36", "llama_cpp/server/types.py", "CreateChatCompletionRequest"),
    (CompletionBody, "llama-cpp-python", "0.3.36", "llama_cpp/server/types.py", "CreateCompletionRequest"),
)
IGNORED = {
    # Where keys and values come from, and which worker gets the request.
    *("ec_transfer_params", "kv_transfer_params", "session_id", "prompt_cache_options"),
    # How images are read; images are refused themselves.
    *("media_io_kwargs", "mm_processor_kwargs", "return_mm_kwargs"),
    # Additions to the answer, and the tokens in one chunk of a stream.
    *("return_prompt_text", "return_token_offsets", "return_weight_versions", "routed_experts_prompt_start"),
    *("enable_response_messages", "stream_interval"),
    # Options of vLLM's own parts.
    *("spaces_between_special_tokens", "vllm_xargs"),
    # Completions and chats read them; responses have an id of their own and always show the reasoning.
    *("request_id", "include_reasoning"),
    # Each only changes what a refused field does.
    *("mirostat_eta", "mirostat_tau"),
}


def fields_of(file: Path, name: str) -> set[str]:
    (found,) = (
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    names = {
        each.target.id for each in found.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return {each for each in names if not each.startswith("_")}


@pytest.mark.parametrize(("kind", "package", "version", "file", "name"), REQUESTS, ids=lambda each: str(each)[:40])
def test_no_field_of_a_peer_is_ignored_by_accident(
    kind: type[Part], package: str, version: str, file: str, name: str
) -> None:
    fields = fields_of(pypi(package, version, sdist=True) / file, name)
    assert len(fields) > 20
    unread = fields - kind.model_fields.keys() - kind.unread.silent
    ignored = {each for each in unread if kind.unread.values_without_effect(each) is None}
    assert ignored <= IGNORED
