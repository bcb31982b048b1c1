"""`quire generate`, `quire chat`, `quire pin` and `quire status` against fake gateways."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.client import Replica
from quire.common.v1 import common_pb2
from quire.rpc.process import missing_package
from quire_cli import mcp, status
from quire_cli.main import COMMANDS, GROUPS, main
from tests.support.fake_gateway import FakeGatewayThread, running_fake_gateway

NOBODY = "127.0.0.1:1"

Run = Callable[..., tuple[int, str, str]]


def test_generate_streams_the_answer_to_a_prompt_or_to_stdin(run: Run) -> None:
    assert run("generate", "once upon") == (0, "once upon!\n", "")
    assert run("generate", stdin="two\nlines\n") == (0, "two\nlines!\n", "")


def test_generate_passes_flags_on(run: Run, gateway: FakeGatewayThread) -> None:
    run("generate", "x", "--temperature=0", "--seed=7", "--max-tokens=3", "--stop=a, b", "--stop=c", "--model=fake")
    assert run("chat", "--beam-width=4", "--length-penalty=-0.5", "--early-stopping=never") == (0, "x!\n", "")
    request, chat = gateway.generation.requests
    beams = chat.sampling.beam_search
    assert (beams.beam_width, beams.length_penalty, beams.early_stopping) == (4, -0.5, common_pb2.EARLY_STOPPING_NEVER)
    assert request.sampling.HasField("temperature")
    assert (request.sampling.seed, request.stopping.max_tokens, request.model) == (7, 3, "fake")
    assert list(request.stopping.stop) == ["a, b", "c"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        *(
            ([f"--http={address}"], f'--http is "{address}"; it must be HOST:PORT, with a port from 1 to 65535')
            for address in ("nowhere", "/run/mcp.sock", "unix:/run/mcp.sock", "127.0.0.1:70000", "127.0.0.1:0")
        ),
        (["--http=127.0.0.1:8765", "--api-key=sk"], "an API key is given with --http, where callers show their own"),
        (["--http=127.0.0.1:8765", "--address=https://x", "--tls-ca-file=missing.pem"], "missing.pem"),
        (["--allow-changes=maybe"], "maybe"),
        (["--allow-change"], "did you mean --allow-changes?"),
        (["--http=127.0.0.1:8765", "--address=ftp://x"], "ftp://x"),
    ],
)
def test_mcp_refuses_flags_in_one_line(run: Run, flags: list[str], message: str) -> None:
    status, _, stderr = run("mcp", *flags)
    assert (status, stderr.count("\n")) == (2, 1), stderr
    assert stderr.startswith("quire mcp: error: ")
    assert message in stderr


@pytest.mark.parametrize("flags", [["--http=127.0.0.1:8765"], []])
def test_mcp_does_not_start_without_a_gateway_that_answers(run: Run, flags: list[str]) -> None:
    status, _, stderr = run("mcp", *flags, f"--address=http://{NOBODY}")
    assert (status, stderr.count("\n")) == (1, 1)
    assert NOBODY in stderr


async def test_mcp_offers_changes_only_if_they_are_allowed() -> None:
    for allows in (False, True):
        flags = replace(mcp.McpFlags(), allow_changes=allows)
        tools = await mcp.make_server(flags, mcp.McpFlags).list_tools()
        changing = [tool.name for tool in tools if tool.annotations is None or not tool.annotations.read_only_hint]
        assert changing == (["drain_replica"] if allows else [])


def test_the_environment_names_a_served_model_and_not_a_directory(
    run: Run, gateway: FakeGatewayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_MODEL", "/models/somewhere")
    run("generate", "x")
    monkeypatch.setenv("QUIRE_SERVED_MODEL_NAME", "fake")
    run("generate", "x")
    run("generate", "x", "--model=other")
    assert [request.model for request in gateway.generation.requests] == ["", "fake", "other"]


def test_a_bad_prompt_is_one_line_and_the_others_of_its_file_are_answered(run: Run) -> None:
    status, stdout, _ = run("generate", "a b", "--format=json")
    assert json.loads(stdout) == {"prompt": "a b", "text": "a b!", "token_ids": [0, 1], "finish_reason": "length"}
    assert run("generate", "bad") == (1, "", "quire generate: error: prompt is bad\n")
    status, stdout, stderr = run("generate", "--file=-", "--format=json", stdin="one\nbad\nfull\n")
    assert status == 1
    one, bad, full = map(json.loads, stdout.splitlines())
    assert one == {"prompt": "one", "text": "one!", "token_ids": [1, 2], "finish_reason": "stop"}
    assert bad == {"prompt": "bad", "error": {"code": "INVALID_ARGUMENT", "message": "prompt is bad"}}
    assert full["text"] == "full!"
    assert stderr == "quire generate: error: prompt 'bad': prompt is bad\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("generate",), "the prompt is empty"),
        (("generate", "x", "--file", "y"), "not both"),
        (("generate", "--file", "/no/such/file"), "cannot read /no/such/file"),
        (("generate", "a\udcff"), r"the argument 'a\udcff' is not UTF-8"),
        (("generate", "x", "--length-penalty=1"), "--length-penalty is for beam search, which needs --beam-width"),
        (("generate", "x", "--beam-width=2", "--early-stopping=soon"), "expected one of false, true, never"),
        (("status", "--tls-cert-file=x"), "must be given together"),
        (("pin",), "the prefix is empty"),
        (("generate", "--file", "-"), "holds no prompt"),
        (("status", "--address", "127.0.0.1:1,nonsense"), "is not HOST:PORT"),
        (("pin", "x", "--time-to-live=0"), "the least value is 0.001"),
        (("unpin",), "give the id of a pin"),
    ],
)
def test_a_command_called_wrongly_is_one_line_and_status_2(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    status, stdout, stderr = run(*arguments, stdin="")
    assert (status, stdout) == (2, "")
    assert stderr.startswith(f"quire {arguments[0]}: error: ")
    assert expected in stderr
    assert stderr.count("\n") == 1


def test_pin_and_unpin(run: Run, gateway: FakeGatewayThread, tmp_path: Path) -> None:
    assert run("pin", "be kind", "--time-to-live=1.5", "--model=fake") == (0, "pin 16 tokens for 1.5 s\n", "")
    status, stdout, _ = run("pin", "--system", "--format=json", stdin="be kind\n")
    assert status == 0
    assert json.loads(stdout) == {"pin_id": "pin", "pinned_tokens": 16, "pinned_blocks": 1, "time_to_live_ms": 300_000}
    text, chat = gateway.generation.requests
    assert (text.text, text.time_to_live_ms, text.model) == ("be kind", 1500, "fake")
    assert [(m.role, m.content) for m in chat.chat.messages] == [("system", "be kind")]
    assert not chat.HasField("time_to_live_ms")
    (tmp_path / "prefix").write_text("be kind\n")
    assert run("pin", "--file", str(tmp_path / "prefix"))[0] == 0
    assert run("unpin", "pin") == (0, "", "")
    assert run("unpin", "other") == (1, "", 'quire unpin: error: no pin "other"\n')


def test_chat_keeps_the_conversation_but_for_what_failed_and_all_before_a_reset(
    run: Run, gateway: FakeGatewayThread
) -> None:
    said = "hello", "", "bad", "and now", "/resett", "/reset", "/usr/bin is a path", "/exit", "never"
    status, stdout, stderr = run("chat", "--system=be kind", stdin="\n".join(said))
    assert (status, stdout) == (1, "hello!\nand now!\n/usr/bin is a path!\n")
    failed, unknown = stderr.splitlines()
    assert failed == "quire chat: error: prompt is bad"
    # A mistyped command is not sent.
    assert unknown.startswith("quire chat: there is no command /resett; /exit leaves")
    assert [[message.content for message in request.messages] for request in gateway.generation.requests] == [
        ["be kind", "hello"],
        ["be kind", "hello", "hello!", "bad"],
        ["be kind", "hello", "hello!", "and now"],
        ["be kind", "/usr/bin is a path"],
    ]
    assert [message.role for message in gateway.generation.requests[2].messages][1:3] == ["user", "assistant"]


def test_status_shows_health_models_and_replicas_as_text_and_as_json(run: Run, gateway: FakeGatewayThread) -> None:
    status, stdout, _ = run("status")
    assert status == 0
    health, model, replica = stdout.splitlines()
    assert health.startswith(f"serving at {gateway.address}")
    assert model == "model fake: LlamaForCausalLM, float32, 128 tokens, chat template"
    assert replica == "replica unix:s: 64 blocks of 16 tokens, 8 sequences and 0 tokens a step, on a fake"
    status, stdout, _ = run("status", "--format=json")
    assert status == 0
    described = json.loads(stdout)
    assert described["serving"] is True
    assert described["models"][0]["name"] == "fake"
    assert described["replicas"][0]["connected"] is True


def test_status_shows_bytes_and_groups_of_layers() -> None:
    replica = Replica("s", True, 1, 16, 2048, 0, 8, 64, None, block_bytes=1 << 20, full_groups=1, windowed_groups=5)
    told = status._replica_line(replace(replica, window=1025))
    assert told == (
        "replica s: 2048 blocks of 16 tokens in one of 6 groups of layers, 5 with a window of 1,025 tokens (2.00 GiB), "
        "8 sequences and 64 tokens a step"
    )
    dense = status._replica_line(replace(replica, windowed_groups=0))
    assert dense == "replica s: 2048 blocks of 16 tokens (2.00 GiB), 8 sequences and 64 tokens a step"
    states = status._replica_line(replace(replica, windowed_groups=0, state_blocks=6))
    assert "(2.00 GiB), the state of a sequence in 6 of them (6.0 MiB), 8 sequences" in states


@pytest.fixture
def other(gateway: FakeGatewayThread) -> Iterator[FakeGatewayThread]:
    """A second gateway."""
    with running_fake_gateway() as other:
        yield other


def test_prompts_of_a_file_go_to_all_gateways(run: Run, gateway: FakeGatewayThread, other: FakeGatewayThread) -> None:
    prompts = [f"prompt {i}" for i in range(200)]
    both = f"{gateway.address},{other.address}"
    status, stdout, stderr = run("generate", "--file=-", "--address", both, stdin="\n".join(prompts))
    assert (status, stderr) == (0, "")
    assert stdout.splitlines() == [f"{prompt}!" for prompt in prompts]
    shares = [len(each.generation.requests) for each in (gateway, other)]
    assert sum(shares) == 200
    assert min(shares) > 0


def test_status_shows_the_others_where_one_does_not_answer(run: Run, gateway: FakeGatewayThread) -> None:
    status, stdout, stderr = run("status", "--address", f"{NOBODY},{gateway.address}")
    assert status == 1
    assert stdout.startswith(f"serving at {gateway.address}")
    assert stderr.startswith(f"quire status: error: {NOBODY}: no gateway answers")
    assert stderr.count("\n") == 1


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command, message in (
        ("sreve", '"sreve" is not a command; did you mean serve?'),
        ("xyzzy", '"xyzzy" is not a command; there are serve, chat, '),
        ("--model", '"--model" comes before a command; flags come after it, as in quire serve --model'),
    ):
        assert main([command]) == 2
        assert capsys.readouterr().err.startswith(f"quire: error: {message}")


def test_a_missing_package_names_the_extras_that_have_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, extras in (
        ("huggingface_hub.errors", "quire-llm[gateway] or quire-llm[worker]"),
        ("zmq", "quire-llm[events]"),
        ("grpc", "quire again"),
    ):
        error = missing_package(ModuleNotFoundError(name=module))
        assert str(error) == f"{module} is not installed; install {extras}"
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "quire_cli.top", raising=False)
    assert main(["top"]) == 2
    assert capsys.readouterr().err == "quire top: error: rich.console is not installed; install quire-llm[top]\n"


def test_help_has_each_command_once_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "quire COMMAND" in text
    assert re.findall(r"^  ([\w-]+)  ", text, re.MULTILINE) == list(COMMANDS)
    assert re.findall(r"^(\S.*):$", text, re.MULTILINE) == list(GROUPS)
    assert max(map(len, text.splitlines())) <= 80
    assert main(["help", "pull"]) == 0
    assert "usage: quire pull" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("quire 0.")
    assert main([]) == 2
    shown = capsys.readouterr()
    assert (shown.out, "quire COMMAND" in shown.err) == ("", True)


def test_a_reader_that_leaves_is_no_traceback_and_a_full_disk_one_line(gateway: FakeGatewayThread) -> None:
    command = f"{sys.executable} -m quire_cli.main generate --address {gateway.address} --file <(printf 'a\\nb\\nc\\n')"
    left, full = (
        subprocess.run(["bash", "-c", f"{command} {to}"], capture_output=True, text=True, timeout=60)
        for to in ("| true", "> /dev/full")
    )
    assert "Traceback" not in left.stderr
    assert "Exception ignored" not in left.stderr
    assert (full.returncode, full.stderr) == (1, "quire generate: error: cannot write: No space left on device\n")


@pytest.mark.parametrize("arguments", ["--help", "serve --help", "keys list {keys}"])
def test_output_that_nobody_takes_fails_in_one_line_at_most(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.json"
    assert main(["keys", "add", str(keys), "--tenant=a"]) == 0
    capsys.readouterr()
    words = arguments.format(keys=keys).split()
    reader, writer = os.pipe()
    os.close(reader)
    program = f"quire {words[0]}" if words[0].isalpha() else "quire"
    full = f"{program}: error: cannot write: No space left on device\n"
    for descriptor, expected in ((writer, ""), (os.open("/dev/full", os.O_WRONLY), full)):
        with os.fdopen(descriptor, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main(words) == 1
            assert capsys.readouterr().err == expected


def test_input_that_is_no_utf8_is_one_line(gateway: FakeGatewayThread) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire_cli.main", "generate", "--address", gateway.address],
        input=b"hi \xff\n",
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert "stdin is not UTF-8" in line


def test_ctrl_c_stops_the_answer_and_not_the_chat(gateway: FakeGatewayThread) -> None:
    terminal, device = pty.openpty()
    # Scripts start background processes with Ctrl-C ignored.
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    command = [*ignoring, sys.executable, "-m", "quire_cli.main", "chat", "--address", gateway.address]
    chat = subprocess.Popen(command, stdin=device, stdout=device, stderr=device, start_new_session=True)
    os.close(device)
    seen = ""

    def read_until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            assert select.select([terminal], [], [], 60)[0], seen
            seen += os.read(terminal, 1024).decode()
        seen = seen.partition(text)[2]

    try:
        read_until("> ")
        os.write(terminal, b"endless\n")
        read_until("endless!")
        chat.send_signal(signal.SIGINT)
        read_until("(stopped)")
        gateway.wait_left()
        read_until("> ")
        os.write(terminal, b"hello\n")
        read_until("hello!")
        read_until("> ")
        os.write(terminal, b"/exit\n")
        assert chat.wait(60) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(terminal)
