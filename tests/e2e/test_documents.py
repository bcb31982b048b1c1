"""Commands and programs of the README, the tutorials and the examples run as they are written, except that the server
has free ports."""

import asyncio
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.documents import command_lines
from tests.support.serving import Served
from tests.support.tiers import parametrize_once
from tests.support.triton_client import TRITON_PYTHON


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one command line `grpcurl -plaintext [-d JSON] ADDRESS {list | SERVICE/METHOD}`."""

    address: str
    target: str
    data: str = "{}"

    @classmethod
    def parse(cls, arguments: list[str]) -> "Call":
        """Raises ValueError for an unknown flag."""
        words, data = [], "{}"
        rest = iter(arguments)
        for word in rest:
            if word == "-d":
                data = next(rest)
            elif word.startswith("-") and word != "-plaintext":
                raise ValueError(f"unknown flag {word}")
            elif word != "-plaintext":
                words.append(word)
        address, target = words
        return cls(address, target, data)

    def run(self) -> list[str]:
        """The services for `list`; else each answer of the method as JSON. Raises grpc.RpcError."""
        with grpc.insecure_channel(self.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            if self.target == "list":
                return sorted(database.get_services())
            service, name = self.target.split("/")
            method = DescriptorPool(database).FindServiceByName(service).FindMethodByName(name)
            request = json_format.ParseDict(json.loads(self.data), GetMessageClass(method.input_type)())
            invoke: Any = (channel.unary_stream if method.server_streaming else channel.unary_unary)(
                f"/{self.target}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            answer = invoke(request, timeout=30)
            answers = list(answer) if method.server_streaming else [answer]
            return [json_format.MessageToJson(each) for each in answers]


ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
README = (ROOT / "README.md").read_text()
GREEDY = ", in a quiet meadow, there lived a"
# The stand-in for grpcurl can only call methods and `list`.
NOT_HERE = re.compile(r" (describe|-max-time|-H|-cacert) ")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def section(heading: str) -> str:
    """A section of the README."""
    return README.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def shell_lines(text: str, pattern: str) -> list[str]:
    lines = [line for block in blocks(text, "sh") for line in command_lines(block)]
    return [line for line in lines if re.search(pattern, line)]


def here(text: str, served: Served) -> str:
    """Replaces addresses in the text by addresses of this server."""
    text = text.replace("127.0.0.1:50051", served.server.grpc_address)
    return text.replace("127.0.0.1:8000", served.server.http_address)


async def run(*command: str | Path, address: str = "") -> str:
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


@pytest.mark.parametrize("line", shell_lines(section("Call it"), r"(^|\| )quire "))
async def test_each_command_line_call_of_the_readme_prints_something(served: Served, line: str) -> None:
    assert (await run("sh", "-c", line, address=served.server.grpc_address)).strip()


async def test_the_python_example_of_the_readme_answers_and_streams(served: Served) -> None:
    (code,) = blocks(section("Call it"), "python")
    out = await run(sys.executable, "-c", here(code, served))
    assert "Paris" in out
    assert len(out.split()) > 20


@pytest.mark.extended
async def test_the_examples_of_other_clients_answer(served: Served) -> None:
    """They follow each other as one program: later ones use names of the first."""
    out = await run(sys.executable, "-c", here("\n".join(blocks(section("OpenAI's API"), "python")), served))
    assert out.count("The capital of France is Paris.") == 3


@pytest.mark.parametrize("line", shell_lines(section("OpenAI's API"), "^curl "))
async def test_each_curl_call_of_the_readme_is_answered(served: Served, line: str) -> None:
    program, url, *options = shlex.split(here(line, served))
    assert (program, options[0], options[2]) == ("curl", "-H", "-d")
    async with httpx.AsyncClient(timeout=30) as http:
        response = await http.post(url, headers=dict([options[1].split(": ", 1)]), content=options[3])
    assert response.status_code == 200
    assert "[DONE]" in response.text or "Paris" in response.text


GRPCURL = shell_lines(section("Call it"), r"(^|\| )grpcurl ")
MORE_GRPCURL = [line for line in shell_lines((EXAMPLES / "grpcurl.md").read_text(), "") if not NOT_HERE.search(line)]


@pytest.mark.parametrize("line", [*GRPCURL, *(pytest.param(line, marks=pytest.mark.extended) for line in MORE_GRPCURL)])
async def test_each_grpcurl_call_works_by_reflection_alone(served: Served, line: str) -> None:
    call = Call.parse(shlex.split(here(line, served))[1:])
    if '"temperature": -1' in line:
        with pytest.raises(grpc.RpcError, match=r"sampling\.temperature is -1"):
            await asyncio.to_thread(call.run)
        return
    answers = await asyncio.to_thread(call.run)
    assert all(answers)
    # A stream has at least a chunk, the end of the sequence and the end of the request.
    assert len(answers) >= 3 or "Stream" not in line


# Texts that the programs of a page print, among others.
PAGES = {
    "getting-started.md": ["The capital of France is Paris."],
    "tutorials/chat.md": ["The capital of France is Paris.", "The capital of Italy is Rome.", "400 tokens, though"],
    "tutorials/structured-output.md": ["city='Paris'", "city='Rome'", "The weather in Rome is sunny, 24 degrees."],
    "tutorials/pinned-prefixes.md": ["blocks", "tokens were cached"],
}


@parametrize_once("page", [*PAGES], second_tier=0)
@pytest.mark.extended
async def test_the_programs_of_a_page_run_one_after_the_other(served: Served, page: str) -> None:
    out = await run(sys.executable, "-c", here("\n".join(blocks((DOCS / page).read_text(), "python")), served))
    assert [each for each in PAGES[page] if each not in out] == []


# Its programs need Chroma, which is larger than all other packages of the tests, and a model of real vectors.
NOT_RUN = {"tutorials/documents.md"}


def test_every_page_with_a_program_is_run() -> None:
    pages = {str(page.relative_to(DOCS)) for page in [DOCS / "getting-started.md", *DOCS.glob("tutorials/*.md")]}
    assert {page for page in pages if "```python" in (DOCS / page).read_text()} == set(PAGES) | NOT_RUN


# Patterns that the output of each example matches, one after the other. The asyncio client gets fewer pieces if it is
# slower than the tokens, so that a piece has several of them.
PROGRAMS = {
    "python/sync_client.py": [
        f"Once upon a time{GREEDY}",
        r"The capital of France is Paris\.",
        # Two samples that differ.
        r"(?m)^\d: (.*)$[\s\S]*^\d: (?!\1$)",
        r"refused: sampling\.temperature is -1",
    ],
    "python/async_client.py": [
        f"Once upon a time{GREEDY}",
        r"\nleft after [1-5] pieces\ntoo late: DEADLINE_EXCEEDED\n$",
    ],
    "python/openai_client.py": [r"^The capital of France is Paris\.\n", r"\(24 tokens\)", "refused: temperature: "],
    "python/triton_client.py": [rf"^Once upon a time({GREEDY}.*)\n\1$"],
    "programs/judge_one_document.py": [
        r"Is there a river\? (yes|no)\n(.*\n)+[1-9][0-9]{3,} of \d+ prompt tokens were cached"
    ],
    "programs/self_consistency.py": [r"\d of 8 say: .+"],
    "programs/tree_of_thought.py": [r"Once upon a time(.*\n)+36 calls, [1-9]\d* cached tokens"],
    "programs/conversation.py": [r"the sum: \d+\nthe city: Paris\nthe story: .+"],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name.startswith("programs/") else pytest.mark.extended)
        for name in PROGRAMS
    ],
)
async def test_an_example_says_what_it_shows(served: Served, name: str) -> None:
    python = TRITON_PYTHON if "triton" in name else sys.executable
    http = f"http://{served.server.http_address}"
    out = await run(python, EXAMPLES / name, http if "openai" in name else served.server.grpc_address)
    assert [each for each in PROGRAMS[name] if not re.search(each, out)] == [], out


def test_every_example_is_run() -> None:
    assert {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.glob("p*/*.py")} == set(PROGRAMS)


def test_the_pinned_packages_of_the_node_examples_are_those_that_they_import() -> None:
    code = "".join(file.read_text() for file in EXAMPLES.glob("node/*.js"))
    imported = {name for name in re.findall(r'from "([^."][^"]*)"', code) if not name.startswith("node:")}
    package = (EXAMPLES / "node" / "package.json").read_text()
    assert imported == set(re.findall(r'"(\S+)": "\d+\.\d+\.\d+"', package))
