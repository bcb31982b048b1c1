"""The examples run as they are written, against all processes."""

import asyncio
import re
import shlex
import sys
from pathlib import Path

import grpc
import pytest

from tests.support.documents import command_lines
from tests.support.reflection_client import Call
from tests.support.serving import Served
from tests.support.triton_client import TRITON_PYTHON

pytestmark = pytest.mark.extended

EXAMPLES = Path(__file__).parents[2] / "examples"
GREEDY = ", there was a little"
# Of what grpcurl can do, the stand-in for it knows calls of methods, and `list`.
NOT_HERE = re.compile(r" (describe|-max-time|-H|-cacert) ")


async def run_example(name: str, *arguments: str, python: str | Path = sys.executable) -> str:
    """The stdout of an example. Asserts that it succeeds."""
    process = await asyncio.create_subprocess_exec(
        python, EXAMPLES / name, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout=200)
    assert process.returncode == 0, err.decode()
    return out.decode()


def calls(text: str) -> list[str]:
    """The command lines of a document that the stand-in for grpcurl can run."""
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return [line for block in blocks for line in command_lines(block) if not NOT_HERE.search(line)]


async def test_the_blocking_client(served: Served):
    out = await run_example("python/sync_client.py", served.server.grpc_address)
    assert f"Once upon a time{GREEDY}" in out
    assert "The capital of France is Paris." in out
    assert len(set(re.findall(r"^\d: (.*)$", out, flags=re.MULTILINE))) > 1
    assert "refused: sampling.temperature is -1" in out


async def test_the_client_for_asyncio(served: Served):
    out = await run_example("python/async_client.py", served.server.grpc_address)
    assert f"Once upon a time{GREEDY}" in out
    # Fewer where the client was slower than the tokens, so that several came in one.
    assert re.search(r"\nleft after [1-5] pieces\ntoo late: DEADLINE_EXCEEDED\n$", out)


async def test_openais_client(served: Served):
    out = await run_example("python/openai_client.py", f"http://{served.server.http_address}")
    assert out.startswith("The capital of France is Paris.\n")
    assert "(24 tokens)" in out
    assert "refused: temperature: " in out


async def test_tritons_client(served: Served):
    out = await run_example("python/triton_client.py", served.server.grpc_address, python=TRITON_PYTHON)
    whole, streamed = out.splitlines()
    assert whole == f"Once upon a time{streamed}"
    assert streamed.startswith(GREEDY)


@pytest.mark.parametrize("line", calls((EXAMPLES / "grpcurl.md").read_text()))
async def test_each_call_by_reflection(served: Served, line):
    call = Call.parse(shlex.split(line.replace("127.0.0.1:50051", served.server.grpc_address))[1:])
    if '"temperature": -1' in line:
        with pytest.raises(grpc.RpcError, match=r"sampling\.temperature is -1"):
            await asyncio.to_thread(call.run)
    else:
        assert all(await asyncio.to_thread(call.run))


def test_the_pinned_packages_of_the_node_examples_are_those_that_they_import():
    code = "".join(file.read_text() for file in EXAMPLES.glob("node/*.js"))
    imported = {name for name in re.findall(r'from "([^."][^"]*)"', code) if not name.startswith("node:")}
    package = (EXAMPLES / "node" / "package.json").read_text()
    assert imported == set(re.findall(r'"(\S+)": "\d+\.\d+\.\d+"', package))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("judge_one_document", r"Is there a river\? (yes|no)\n(.*\n)+[1-9][0-9]{3,} of \d+ prompt tokens were cached"),
        ("self_consistency", r"\d of 8 say: .+"),
        ("tree_of_thought", r"Once upon a time(.*\n)+36 calls, [1-9]\d* cached tokens"),
        ("conversation", r"the sum: \d+\nthe city: Paris\nthe story: .+"),
    ],
)
async def test_each_program_over_a_cached_prefix(served: Served, name: str, says: str):
    assert re.search(says, await run_example(f"programs/{name}.py", served.server.grpc_address))
