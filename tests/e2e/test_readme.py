"""The calls of the README run as they are written, but for the ports: the server has free ones."""

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.documents import command_lines
from tests.support.reflection_client import Call
from tests.support.serving import Served

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str, heading: str) -> list[str]:
    """The code blocks of this language below the heading."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)


def shell_lines(program: str) -> list[str]:
    lines = [line for block in blocks("sh", "Call it") for line in command_lines(block)]
    return [line for line in lines if re.search(rf"(^|\| ){program} ", line)]


@pytest.fixture
def address(served: Served) -> str:
    """The server has any free port; the README's address is replaced by it."""
    return served.server.grpc_address


async def run(*command: str, address: str) -> str:
    """Runs the command with the venv's programs first; returns its stdout. Asserts that it succeeds."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PATH": path, "QUIRE_ADDRESS": address},
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout=200)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("line", shell_lines("quire"))
async def test_each_command_line_call_prints_something(line, address):
    assert (await run("sh", "-c", line, address=address)).strip()


async def test_the_python_example_answers_and_streams(address):
    (code,) = blocks("python", "Call it")
    out = await run(sys.executable, "-c", code.replace("127.0.0.1:50051", address), address=address)
    assert "Paris" in out
    assert len(out.split()) > 20


@pytest.mark.extended
async def test_the_examples_of_other_clients_answer(served):
    """The examples follow each other as one program: later ones use names of the first."""
    url = f"http://{served.server.http_address}"
    code = "\n".join(blocks("python", "OpenAI's API")).replace("http://127.0.0.1:8000", url)
    out = await run(sys.executable, "-c", code, address=served.server.grpc_address)
    assert out.count("The capital of France is Paris.") == 3
    assert "is_large=" in out
    assert 'get_weather {"city": "Rome"}\nThe weather in Rome is sunny, 24 degrees.\n' in out


@pytest.mark.parametrize("line", shell_lines("grpcurl"))
async def test_each_grpcurl_call_works_by_reflection_alone(line, address):
    arguments = shlex.split(line.replace("127.0.0.1:50051", address))[1:]
    answers = await asyncio.to_thread(Call.parse(arguments).run)
    assert all(answers)
    # Of a stream at least a chunk, the end of the sequence and that of the request.
    assert len(answers) >= 3 or "Stream" not in line
