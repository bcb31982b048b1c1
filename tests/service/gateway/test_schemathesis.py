"""Requests that schemathesis draws from /openapi.json get answers that it describes.

The server can seldom run a body that is drawn from the schema only. So most bodies are runnable ones, with two fields
of the drawn body.
"""

import asyncio
from collections import Counter, defaultdict
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.fake_scheduler import FakeScheduler, scripted
from tests.support.gateway_process import running_gateway
from tests.support.rig import EOS, TOKENIZER
from tests.support.tiers import is_third_tier

pytestmark = pytest.mark.extended
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MESSAGES = [{"role": "user", "content": "hello"}]
INPUTS = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]}
RUNNING = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hello"},
    "/v1/responses/compact": {"input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3, "model": "quire-tiny"},
    "/v1/messages/count_tokens": {"messages": MESSAGES, "model": "quire-tiny"},
    "/v2/models/{model}/infer": INPUTS,
    "/v2/models/{model}/versions/{version}/infer": INPUTS,
    **{
        f"/v2/models/{{model}}{version}/generate{end}": {"text_input": "hello", "max_tokens": 3}
        for version in ("", "/versions/{version}")
        for end in ("", "_stream")
    },
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v2/repository/index": {},
    "/v1/embeddings": {"input": "hello"},
    **{path: {"query": "hello", "documents": ["a"]} for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
    "/v1/score": {"text_1": "hello", "text_2": "a"},
    **{path: {"texts": ["hello"], "embedding_types": ["float", "ubinary"]} for path in ("/v1/embed", "/v2/embed")},
    "/embed": {"inputs": "hello"},
    "/similarity": {"inputs": {"source_sentence": "hello", "sentences": ["a"]}},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/load_lora_adapter": {"lora_name": "mine", "lora_path": "/adapters/mine"},
    "/v1/unload_lora_adapter": {"lora_name": "mine"},
}
STREAMING = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
# In the third tier the number that other properties draw.
NUM_BODIES, NUM_PATHS = (1000, 50) if is_third_tier() else (5, 2)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(tmp_path_factory: pytest.TempPathFactory):
    rule = scripted([*TOKENIZER.encode("It is so.", add_special_tokens=False).ids, EOS])
    directory = tmp_path_factory.mktemp("batches")
    async with (
        FakeScheduler(rule=rule) as scheduler,
        running_gateway(scheduler, max_stored_response_bytes=1 << 20, batch_dir=directory) as running,
    ):
        yield running


@st.composite
def cases(draw: st.DrawFn, operation: Any, parameters: dict[str, str]) -> Any:
    modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
    case = draw(operation.as_strategy(generation_mode=draw(st.sampled_from(modes))))
    if isinstance(case.body, dict) and draw(st.integers(0, 3)):
        kept = draw(st.sets(st.sampled_from(sorted(case.body)), max_size=2)) if case.body else ()
        case.body = RUNNING[operation.path] | {name: case.body[name] for name in kept}
    if isinstance(case.body, dict):
        # The fake scheduler makes one sequence a request.
        case.body = {name: value for name, value in case.body.items() if name not in ("n", "best_of")}
        if operation.path in STREAMING and not draw(st.integers(0, 3)):
            case.body["stream"] = True
    for name in case.path_parameters:
        if draw(st.integers(0, 3)):
            case.path_parameters[name] = parameters[name]
    return case


def statuses_of(operation: Any, url: str, parameters: dict[str, str]) -> Counter[int]:
    """Sends drawn requests and checks their answers. A failure is raised with a command that repeats it."""
    seen: Counter[int] = Counter()

    @hypothesis.settings(
        max_examples=NUM_BODIES if operation.body else NUM_PATHS,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @hypothesis.given(case=cases(operation, parameters))
    def send(case: Any) -> None:
        seen[case.call_and_validate(base_url=url, checks=CHECKS).status_code] += 1

    send()
    return seen


async def test_answers_to_drawn_requests_are_those_that_the_document_describes(gateway):
    document = (await gateway.http.get("/openapi.json")).json()
    stored = (await gateway.http.post("/v1/responses", json={"input": "hello"})).json()
    lines = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello"}}'
    upload = {"files": {"file": ("lines.jsonl", lines)}, "data": {"purpose": "batch"}}
    file = (await gateway.http.post("/v1/files", **upload)).json()
    batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    parameters = {
        "model": "quire-tiny",
        "version": "1",
        "response_id": stored["id"],
        "request_id": stored["id"],
        "file_id": file["id"],
        "batch_id": (await gateway.http.post("/v1/batches", json=batch)).json()["id"],
    }
    found = list(schemathesis.openapi.from_dict(document).get_all_operations())
    operations = [each.ok() for each in found if isinstance(each, Ok)]
    assert len(operations) == len(found)
    # The stored response and the file are deleted last.
    operations.sort(key=lambda operation: operation.method == "delete")
    statuses: dict[str, Counter[int]] = defaultdict(Counter)
    for operation in operations:
        statuses[operation.path] += await asyncio.to_thread(statuses_of, operation, gateway.http_url, parameters)
    assert set(statuses) == set(document["paths"])
    # No single path is sure to have both.
    of_bodies = sum((statuses[path] for path in RUNNING), start=Counter[int]())
    assert min(of_bodies[200], of_bodies[400]) > of_bodies.total() // 10, of_bodies
