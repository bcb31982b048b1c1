"""Compares Quire with llama.cpp's server over HTTP: both read one GGUF file of a shape with random weights.

llama.cpp's sources have the converter, and a build of them has `llama-quantize` and `llama-server`; docs/measure.md
says how to build them. Model and file are written at the first run. Then both servers run, and `bench servers` sends
them the loads in turn: one stream, 32 streams, and prompts of 800 tokens.
"""

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from bench import servers
from bench.serving import model_of, quire_serve, served

_LOADS = {
    "1 stream": "--prompt-len 100 --output-len 64 --max-concurrency 1 --num-requests 3",
    "32 streams": "--prompt-len 64 --output-len 48 --max-concurrency 32 --num-requests 32",
    "prompts": "--prompt-len 800 --output-len 1 --max-concurrency 1 --num-requests 4",
}
_FLAGS_OF_ALL_LOADS = "--dataset fixed --vocab-size 8000 --max-model-len 1024 --warm-up-requests 1"
_CONVERT = """
import runpy, sys
sources, *sys.argv[1:] = sys.argv[1:]
sys.path[:0] = [sources, sources + "/gguf-py"]
from conversion.base import TextModel
# The converter knows tokenizers by what they make of a text, and not the one that is written here.
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
# No model here has layers that draft tokens, which the converter expects of some families.
TextModel.no_mtp = True
runpy.run_path(sources + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shape", help="a shape of bench/models.py")
    parser.add_argument("--sources", type=Path, required=True, help="directory of llama.cpp's sources")
    parser.add_argument("--programs", type=Path, required=True, help="directory of llama-server and llama-quantize")
    parser.add_argument("--files", type=Path, required=True, help="directory for models, files and logs")
    parser.add_argument("--format", default="Q4_K_M", help="format of the file, as llama-quantize names it, or BF16")
    parser.add_argument("--quire-flags", default="--quantization=int8-dynamic", help="further flags of `quire serve`")
    parser.add_argument("--threads", type=int, default=2, help="threads of each server")
    parser.add_argument("--ports", default="8201,8202", help="ports of Quire and llama.cpp")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each load at each server, in turn")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first load, as in `bench servers`")


def main(arguments: argparse.Namespace) -> None:
    files: Path = arguments.files
    files.mkdir(parents=True, exist_ok=True)
    file = files / f"{arguments.shape}-{arguments.format}.gguf"
    if not file.exists():
        _write_file(arguments.shape, arguments.format, file, arguments.sources, arguments.programs)
    ports = [int(each) for each in arguments.ports.split(",")]
    flags = ["--max-num-seqs=32", "--max-model-len=1024", "--speculate=off", f"--num-threads={arguments.threads}"]
    quire = quire_serve(file, ports[0], *flags, *arguments.quire_flags.split())
    llama = [f"{arguments.programs}/llama-server", "--model", str(file), "--port", str(ports[1])]
    llama += ["--ctx-size", "32768"]
    llama += ["--threads", str(arguments.threads), "--parallel", "32", "--no-webui", "--cache-ram", "0"]
    with ExitStack() as stack:
        reports = files / f"reports-{time.time_ns()}"
        stack.enter_context(served(quire, ports[0], files / "quire.log"))
        stack.enter_context(served(llama, ports[1], files / "llama.log"))
        loads = [servers.NamedLoad(name, f"{load} {_FLAGS_OF_ALL_LOADS}") for name, load in _LOADS.items()]
        urls = [(name, f"http://127.0.0.1:{port}") for name, port in zip(("quire", "llama.cpp"), ports, strict=True)]
        servers.main(argparse.Namespace(**vars(arguments) | {"servers": urls, "load": loads, "reports": reports}))


def _write_file(shape: str, form: str, file: Path, sources: Path, programs: Path) -> None:
    """Writes the model, converts it and rounds it, each by the program that its users have."""
    converted = file.with_name(f"{shape}-BF16.gguf")
    if not converted.exists():
        model = model_of(shape, file.parent, whole_vocabulary=True)
        flags = ["--outfile", str(converted), "--outtype", "bf16"]
        subprocess.run([sys.executable, "-c", _CONVERT, str(sources), str(model), *flags], check=True)
    if file != converted:
        subprocess.run([f"{programs}/llama-quantize", str(converted), str(file), form, "2"], check=True)
