"""--fronts: what a gateway without some of its fronts serves, refuses and imports."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from gateway.settings import FRONTS, GatewaySettings
from quire.gateway.v1 import model_pb2
from quire.runtime.settings import ConfigurationError, load_settings
from tests.support.gateway_process import RunningGateway, running_gateway

ROOT = Path(__file__).parents[3]
IMPORT_IN_TURN = """
import json, sys
from gateway.app import import_fronts
def packages():
    return sorted({each.split(".")[2] for each in sys.modules if each.startswith("gateway.api.")} & set(sys.argv[1:]))
print(json.dumps([packages(), *(import_fronts([each]) and packages() for each in sys.argv[1:])]))
"""
# One call for each front.
CALLS = {
    "openai": ("POST", "/v1/chat/completions"),
    "responses": ("POST", "/v1/responses"),
    "anthropic": ("POST", "/v1/messages"),
    "kserve": ("GET", "/v2/health/live"),
    "batches": ("GET", "/v1/batches"),
    "ui": ("GET", "/ui/about"),
}


async def served_by(gateway: RunningGateway) -> set[str]:
    """The fronts that serve their call. All others must answer it like a path that no gateway knows."""
    served = set(CALLS)
    for front, (method, path) in CALLS.items():
        answer, unknown = [await gateway.http.request(method, each) for each in (path, "/no/such/path")]
        if answer.status_code == 404:
            served.remove(front)
            assert answer.text == unknown.text.replace("/no/such/path", path)
    return served


@pytest.mark.parametrize(
    "fronts", [("anthropic",), ("openai", "batches"), ("kserve", "ui"), (), ("responses",)], ids=str
)
async def test_a_gateway_serves_only_the_chosen_fronts(scheduler, fronts: Sequence[str]):
    async with running_gateway(scheduler, fronts=fronts) as gateway:
        assert await served_by(gateway) == set(fronts)
        assert (await gateway.http.get("/v1/models")).status_code == 200
        assert (await gateway.http.get("/openapi.json")).status_code == 200
        assert len((await gateway.models.ListModels(model_pb2.ListModelsRequest())).models) == 1
        live = gateway.channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        if "kserve" in fronts:
            await live(b"")
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await live(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_front_that_is_left_out_is_not_imported():
    command = [sys.executable, "-c", IMPORT_IN_TURN, *FRONTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    names = list(FRONTS)
    assert json.loads(done.stdout) == [sorted(names[:number]) for number in range(len(names) + 1)]


async def test_the_page_without_openai_has_no_parameters_of_a_chat(scheduler):
    async with running_gateway(scheduler, fronts=("ui",)) as gateway:
        assert (await gateway.http.get("/ui/about")).json()["parameters"] is None
        assert (await gateway.http.post("/ui/v1/chat/completions")).status_code == 404


async def test_batches_have_requests_of_the_other_fronts(scheduler, tmp_path):
    async with running_gateway(scheduler, fronts=("responses", "batches"), batch_dir=tmp_path / "b") as gateway:
        body = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
        answer = await gateway.http.post("/v1/batches", json=body)
        assert answer.json()["error"]["message"].endswith("it must be one of /v1/responses")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--fronts=openai,grpc"],
            "--fronts has 'grpc'; name some of openai, responses, anthropic, kserve, batches, ui, or leave --fronts "
            "out to serve all",
        ),
        (
            ["--fronts=batches"],
            "--fronts has batches, but neither openai nor responses, whose requests batches run; add one of them, or "
            "leave batches out",
        ),
        (
            ["--fronts=openai,ui", "--batch-dir=b"],
            "--batch-dir is set, but --fronts is openai,ui, without batches; add batches, or leave --batch-dir out",
        ),
        (
            ["--fronts=openai", "--response-store=sqlite:a.db"],
            "--response-store is set, but --fronts is openai, without responses; add responses, or leave "
            "--response-store out",
        ),
    ],
)
def test_a_wrong_choice_is_one_line_with_the_way_out(flags, message):
    with pytest.raises(ConfigurationError) as caught:
        load_settings(GatewaySettings, flags, {}, program="quire gateway")
    assert str(caught.value).endswith(message)
    assert "\n" not in str(caught.value)
