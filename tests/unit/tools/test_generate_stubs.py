"""The stub generator: what it writes, and what it does with a proto that is wrong."""

from pathlib import Path

import pytest

from tools.generate_stubs import ROOT, generate

GREETING = """
syntax = "proto3";
package quire.greeting.v1;
service GreetingService {
  rpc Greet(GreetRequest) returns (GreetResponse);
}
message GreetRequest {}
message GreetResponse {}
"""


def write_proto(root: Path, text: str) -> Path:
    file = root / "quire" / "greeting" / "v1" / "greeting.proto"
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    return root


def test_stubs_land_in_the_folder_of_their_package(tmp_path: Path) -> None:
    protos = write_proto(tmp_path / "protos", GREETING)
    out = tmp_path / "not" / "there" / "yet"

    sources = generate(protos, out)

    assert [source.name for source in sources] == ["greeting.proto"]
    written = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    assert written == {
        "quire/greeting/v1/greeting_pb2.py",
        "quire/greeting/v1/greeting_pb2.pyi",
        "quire/greeting/v1/greeting_pb2_grpc.py",
    }
    assert "class GreetingServiceServicer" in (out / "quire/greeting/v1/greeting_pb2_grpc.py").read_text("utf-8")


def test_every_contract_gets_its_three_files(tmp_path: Path) -> None:
    sources = generate(ROOT / "protos", tmp_path)

    for source in sources:
        folder = source.relative_to(ROOT / "protos").parent
        is_ours = folder.parts[0] == "quire"
        package = tmp_path / folder if is_ours else tmp_path / "quire" / folder
        for suffix in ("_pb2.py", "_pb2.pyi", *(("_pb2_grpc.py",) if is_ours else ())):
            assert (package / f"{source.stem}{suffix}").is_file()


def test_a_broken_proto_is_refused_with_its_folder_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    protos = write_proto(tmp_path / "protos", GREETING.replace("message GreetResponse {}", ""))

    with pytest.raises(RuntimeError, match=str(protos)):
        generate(protos, tmp_path / "out")

    assert '"GreetResponse" is not defined' in capfd.readouterr().err
