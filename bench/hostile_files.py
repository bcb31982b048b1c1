"""Damaged and malicious model files: each of many mutations must be loaded, or refused by one clear line.

A mutation is a function of its number. It is read as a gateway and a worker read a model, and run for a few tokens, in
a process with limited address space. Failures are a traceback, a message of several lines, an end by a signal, and
memory or time above the limits; the command then exits with 1, and prints how to repeat them.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models as tokenizer_models
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from bench.report import Series, write_results
from gateway.offload import FairExecutor
from gateway.text.tokenizer import Tokenizer
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from worker_svc.device.kv_pool import PoolRequest, allocate_pool, pool_geometry
from worker_svc.device.replay import make_forward
from worker_svc.gguf_writer import write_gguf
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.models.base import ModelInput
from worker_svc.models.registry import load_model
from worker_svc.step import WorkerLimits

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "pieces": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "gpt2": {"model_type": "gpt2", "n_inner": 256},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 2, "sliding_window": None},
}
_FORMATS = (
    ("llama", "Q4_K_M"),
    ("pieces", "Q8_0"),
    ("qwen3", "IQ4_XS"),
    ("gpt2", "Q6_K"),
    ("mixtral", "Q8_0"),
    ("llama", "F16"),
)
_LIMITS = [1 << bits for bits in (3, 8, 16, 31, 32, 40, 62, 63)]
_NUMBERS = (0, 1, 2, 3, *(limit + more for limit in _LIMITS for more in (-1, 0, 1)), (1 << 64) - 1)
"""Numbers at the limits of integers and of sizes."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NAN_16 = (b"\xff\x7f", b"\x00\x7e", b"\x00\x7c", b"\x00\xfc", b"\xff\xff")
_CASES_PER_PROCESS = 250
_LONGEST_LINE = 2000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mutation.

    Attributes:
        kind: "loaded", "refused", or what is wrong.
        text: The message.
        cpu_s: CPU time, which includes the little that making the file takes.
    """

    number: int
    source: str
    kind: str
    text: str
    cpu_s: float

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("loaded", "refused")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation, as in a failure")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--memory", type=int, default=1024, help="MiB of address space beyond an idle process")
    parser.add_argument("--seconds", type=float, default=120.0, help="time after which a mutation hangs")


def main(arguments: argparse.Namespace) -> None:
    numbers = range(arguments.first, arguments.first + arguments.mutations)
    outcomes = run(numbers, arguments.processes, arguments.memory << 20, arguments.seconds)
    kinds = Counter(outcome.kind for outcome in outcomes)
    by_source = Counter((outcome.source, outcome.kind) for outcome in outcomes)
    for (source, kind), count in sorted(by_source.items()):
        print(f"{source:<20} {kind:<10} {count:>6}")
    print(dict(kinds), f"slowest: {max(outcome.cpu_s for outcome in outcomes):.2f} s of CPU time")
    series = [Series("CPU time", "s", (max(outcome.cpu_s for outcome in outcomes),))]
    counts = {f"{source}, {kind}": count for (source, kind), count in sorted(by_source.items())}
    write_results(arguments.out, "Mutations of model files", series, outcomes=dict(kinds), by_source=counts)
    if any(outcome.is_failure for outcome in outcomes):
        raise SystemExit(1)


def run(numbers: Sequence[int], num_processes: int, memory: int, seconds: float) -> list[Outcome]:
    """The outcomes of these mutations."""
    # Threads would wait for each other if several processes share a processor.
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as made:
        sources = Path(made) / "sources"
        make_sources(sources)
        pieces = [numbers[start : start + _CASES_PER_PROCESS] for start in range(0, len(numbers), _CASES_PER_PROCESS)]
        with ThreadPoolExecutor(num_processes) as threads:
            return [
                each
                for found in threads.map(lambda piece: _run_piece(piece, sources, memory, seconds), pieces)
                for each in found
            ]


def _run_piece(numbers: Sequence[int], sources: Path, memory: int, seconds: float) -> list[Outcome]:
    """Runs the mutations in one process, and in a new one whenever it ends."""
    context, found, left = multiprocessing.get_context("forkserver"), [], list(numbers)
    # Modules that loading imports are imported once.
    context.set_forkserver_preload([__name__])
    while left:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, sources, memory, left), daemon=True)
        process.start()
        theirs.close()
        try:
            while left:
                # The first answer also waits for imports.
                if not ours.poll(seconds + (300 if len(left) == len(numbers) else 60)):
                    found.append(Outcome(left.pop(0), "", "hangs", f"no answer within {seconds} s", seconds))
                    break
                found.append(ours.recv())
                left.pop(0)
        except EOFError:
            process.join()
            found.append(Outcome(left.pop(0), "", "crashes", f"exit code {process.exitcode}", 0.0))
        process.kill()
        process.join()
    for outcome in found:
        if outcome.is_failure:
            print(
                f"{outcome.kind}: --first {outcome.number} --mutations 1 ({outcome.source}): {outcome.text[-600:]}",
                flush=True,
            )
    return found


def _serve(answers: Connection, sources: Path, memory: int, numbers: Sequence[int]) -> None:
    torch.set_num_threads(1)
    for source in sorted(sources.iterdir()):
        # Modules that are imported late are imported before memory is counted.
        _load(source)
    # Collections after each mutation then visit only its objects, not all imported ones, which took most of the time.
    gc.collect()
    gc.freeze()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as directory:
        for number in numbers:
            answers.send(_outcome(number, sources, Path(directory)))


def _outcome(number: int, sources: Path, directory: Path) -> Outcome:
    began = time.process_time()
    generator = random.Random(number)
    source = generator.choice(sorted(sources.iterdir()))
    model = mutated(source, directory, generator)
    try:
        _load(model)
        kind, text = "loaded", ""
    except ConfigurationError as error:
        text = str(error)
        is_clear = text and text.isprintable() and len(text) <= _LONGEST_LINE
        kind = "refused" if is_clear else "unclear"
    except BaseException as error:
        kind, text = "traceback", f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
        shutil.rmtree(model) if model.is_dir() else model.unlink()
    return Outcome(number, source.name, kind, text, time.process_time() - began)


def _load(path: Path) -> None:
    """Loads as a gateway and a worker do, and runs a few tokens, whatever they are."""
    described = ModelDirectory.open(path)
    tokenizer = Tokenizer.open(described, FairExecutor(1))
    tokenizer.decode([0, 1, 2], include_special_tokens=True)
    device, num_tokens = torch.device("cpu"), 4
    model = load_model(path, device=device, dtype=torch.bfloat16)
    pool = allocate_pool(pool_geometry(model, PoolRequest(16, 1, None, 0, 1, model.dtype), None), device, model.dtype)
    limits = WorkerLimits(1, num_tokens, max_steps_in_flight=1, max_logprobs=0)
    forward = make_forward(model, pool, 2 * num_tokens, limits)
    tokens, length = torch.arange(num_tokens), torch.tensor([num_tokens], dtype=torch.int32)
    start_loc, tables = torch.tensor([0, num_tokens], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    attention = AttentionMetadata(
        slot_mapping=tokens,
        block_tables=tables,
        query_start_loc=start_loc,
        seq_lens=length,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    with torch.inference_mode():
        model.logits(forward(ModelInput(tokens, tokens, [attention], pool.gpu)))


# Sources.


def make_sources(directory: Path) -> None:
    """Writes small models of several families, in files of several types."""
    directory.mkdir()
    made = directory.parent / "made"
    torch.manual_seed(0)
    for name, family in _FAMILIES.items():
        config = AutoConfig.for_model(**_SIZES, **family)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made / name)
        (made / name / "tokenizer.json").write_bytes(_tokenizer(in_pieces=name == "pieces"))
    for name, format in _FORMATS:
        write_gguf(made / name, directory / f"{name}-{format}.gguf", format, lambda *_: None)
    for name in ("llama", "gpt2"):
        shutil.copytree(made / name, directory / f"{name}-safetensors")


def _tokenizer(*, in_pieces: bool) -> bytes:
    """A tokenizer of one of the two kinds that model files have."""
    space = "\u2581" if in_pieces else "\u0120"
    letters = pre_tokenizers.ByteLevel.alphabet()
    alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), space] if in_pieces else sorted(letters)
    merges = [(space, "a"), ("t", "h"), ("th", "e")]
    tokens: list[str] = [*alphabet, *(("a", "t", "h", "e") if in_pieces else ())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    if not in_pieces:
        tokenizer = RawTokenizer(tokenizer_models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer.to_str().encode()
    kind = tokenizer_models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = RawTokenizer(kind)
    tokenizer.normalizer = normalizers.Replace(" ", space)
    return tokenizer.to_str().encode()


# Mutations.


def mutated(source: Path, directory: Path, generator: random.Random) -> Path:
    """A copy of `source` with one to three mutations."""
    if source.is_dir():
        copy = directory / "model"
        shutil.copytree(source, copy)
        file, change = copy / "model.safetensors", _mutate_safetensors
    else:
        copy = file = directory / "model.gguf"
        shutil.copy(source, file)
        change = _mutate_gguf
    content = bytearray(file.read_bytes())
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        changed = change(content, generator) if generator.random() < 0.75 else None
        content = _mutate_bytes(content, generator) if changed is None else changed
    file.write_bytes(content)
    return copy


def _mutate_bytes(content: bytearray, generator: random.Random) -> bytearray:
    """Damage as by a disk or a broken copy."""
    size = len(content)
    at = generator.randrange(max(size, 1)) if generator.random() < 0.5 else generator.randrange(max(min(size, 4000), 1))
    match generator.randrange(6):
        case 0:
            for _ in range(generator.choice((1, 4, 64))):
                if size:
                    content[(at + generator.randrange(4096)) % size] ^= 1 << generator.randrange(8)
        case 1:
            del content[at:]
        case 2:
            del content[at : at + generator.choice((1, 8, 4096))]
        case 3:
            content[at:at] = generator.randbytes(generator.choice((1, 8, 4096)))
        case 4:
            content[at : at + 8] = struct.pack("<Q", generator.choice(_NUMBERS))
        case _:
            other = generator.randrange(max(size, 1))
            content[at : at + 512] = content[other : other + 512]
    return content


@dataclass(frozen=True, slots=True)
class _Field:
    """A number in a header: its position and its struct code."""

    at: int
    code: str


@dataclass(slots=True)
class _Walk:
    """Positions in a GGUF header: numbers that are lengths, counts, types, dimensions and offsets; values by
    (beginning, end), with their types before them; the descriptions of tensors."""

    numbers: list[_Field]
    values: list[tuple[int, int]]
    tensors: list[tuple[int, int]]
    end: int


def _walk(content: bytearray) -> _Walk:
    """Raises struct.error or IndexError if an earlier mutation has broken the header."""
    walk, at = _Walk([], [], [], 0), 4

    def number(code: str) -> Any:
        nonlocal at
        walk.numbers.append(_Field(at, code))
        (value,) = struct.unpack_from(f"<{code}", content, at)
        at += struct.calcsize(f"<{code}")
        return value

    def text() -> None:
        nonlocal at
        at += number("Q")

    def value(kind: int) -> None:
        nonlocal at
        if kind == _STRING:
            text()
        elif kind == _ARRAY:
            kind, length = number("I"), number("Q")
            if kind == _STRING:
                for _ in range(length):
                    text()
            else:
                at += length * struct.calcsize(_SCALARS[kind])
        else:
            at += struct.calcsize(_SCALARS[kind])

    number("I")
    num_tensors, num_values = number("Q"), number("Q")
    for _ in range(num_values):
        text()
        began = at
        value(number("I"))
        walk.values.append((began, at))
    for _ in range(num_tensors):
        began = at
        text()
        for _ in range(number("I")):
            number("Q")
        number("I")
        number("Q")
        walk.tensors.append((began, at))
    walk.end = at
    return walk


def _mutate_gguf(content: bytearray, generator: random.Random) -> bytearray | None:
    """Damage with knowledge of the format; None if the header is already broken."""
    try:
        walk = _walk(content)
    except (struct.error, KeyError, MemoryError, OverflowError):
        return None
    data = content[-(-walk.end // 32) * 32 :]

    def spliced(began: int, end: int, new: bytes) -> bytearray:
        head = content[:began] + new + content[end : walk.end]
        return head + bytes(-len(head) % 32) + data

    # Most numbers are the lengths of tokens.
    few = (
        [each for each in walk.numbers if each.at < 2000 or each.at >= walk.tensors[0][0]]
        if walk.tensors
        else walk.numbers
    )
    began, end = generator.choice(walk.values)
    first, last = generator.choice(walk.tensors)
    match generator.randrange(9):
        case 0 | 1 | 2:
            field = generator.choice(few if generator.random() < 0.8 else walk.numbers)
            (old,) = struct.unpack_from(f"<{field.code}", content, field.at)
            value = generator.choice((*_NUMBERS, old + 1, old - 1, old * 2, generator.randrange(64)))
            struct.pack_into(f"<{field.code}", content, field.at, value % (1 << 8 * struct.calcsize(field.code)))
            return content
        case 3 | 4:
            return spliced(began, end, _any_value(generator))
        case 5:
            # Gives two tensors the same position, shape or name.
            other = generator.choice(walk.tensors)
            return spliced(first, last, bytes(content[slice(*other)]))
        case 6:
            # Without the key, the length before the value belongs to another value.
            return spliced(began, end, b"")
        case 7:
            struct.pack_into(
                "<Q", content, last - 8, generator.choice((*_NUMBERS, len(data) - 32, len(data) // 64 * 32))
            )
            return content
        case _:
            # NaN scales in the tensors.
            at = len(content) - len(data)
            for _ in range(generator.choice((1, 100, 10_000))):
                place = at + generator.randrange(max(len(data) // 2, 1)) * 2
                content[place : place + 2] = generator.choice(_NAN_16)
            return content


def _any_value(generator: random.Random) -> bytes:
    """A random type and a value of it."""
    match generator.randrange(6):
        case 0:
            text = generator.choice(
                ("x", "\u0000", "\u202e\n\x1b[31m", "{{ x }}", "llama", "gemma2", "qwen2moe")
            ) * generator.choice((0, 1, 1000, 1_000_000))
            return struct.pack("<IQ", _STRING, len(text.encode())) + text.encode()
        case 1:
            depth = generator.choice((1, 2, 1000, 100_000))
            return struct.pack("<I", _ARRAY) + struct.pack("<IQ", _ARRAY, 1) * depth + struct.pack("<IQ", 0, 0)
        case 2:
            kind = generator.choice([*_SCALARS])
            length = generator.choice((0, 1, 300, 100_000, 10_000_000))
            item = generator.randbytes(struct.calcsize(_SCALARS[kind]))
            return struct.pack("<IIQ", _ARRAY, kind, length) + item * min(length, 200_000)
        case 3:
            length = generator.choice((0, 1, 300, 100_000))
            text = generator.choice((b"", b"a", b"a b", b"\xff", b"<0x00>", b"a" * 5000))
            if length == 100_000:
                text = text[:100]
            return struct.pack("<IIQ", _ARRAY, _STRING, length) + (struct.pack("<Q", len(text)) + text) * length
        case 4:
            number = generator.choice((math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-40, 3e38))
            return struct.pack("<If", 6, number)
        case _:
            kind = generator.choice([*_SCALARS, 13, 200])
            return (
                struct.pack("<I", kind)
                + generator.choice(_NUMBERS).to_bytes(8, "little")[: struct.calcsize(_SCALARS.get(kind, "B"))]
            )


def _mutate_safetensors(content: bytearray, generator: random.Random) -> bytearray | None:
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(bytes(content[8 : 8 + length]))
        data = content[8 + length :]
        name = generator.choice([name for name in header if name != "__metadata__"])
        tensor = header[name]
        other = header[generator.choice([each for each in header if each != "__metadata__"])]
        size = tensor["data_offsets"]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    numbers = (*_NUMBERS, -1, 0.5, 1e300, None, "1", [1], {})
    text: str | None = None
    match generator.randrange(11):
        case 0:
            tensor["dtype"] = generator.choice(
                ("F32", "F64", "BOOL", "U8", "I64", "F8_E4M3", "F4", "C64", "", 3, None, "X" * 100_000)
            )
        case 1:
            tensor["shape"] = [generator.choice(numbers) for _ in range(generator.randrange(9))]
        case 2:
            size[generator.randrange(2)] = generator.choice(numbers)
        case 3:
            tensor["data_offsets"] = other["data_offsets"]
        case 4:
            header[name] = other
        case 5:
            header[generator.choice(("", "x" * 1_000_000, "\u202e\n", "__metadata__", name + "x"))] = header.pop(name)
        case 6:
            header["__metadata__"] = generator.choice(({"format": "pt", "x": "y" * 10_000_000}, {"x": 3}, [], None, {}))
        case 7:
            text = (
                json.dumps(header)[:-1]
                + ', "deep": '
                + generator.choice("[{") * generator.choice((10, 1000, 1_000_000))
            )
        case 8:
            text = json.dumps(header)[:-1] + f', "{name}": {json.dumps(other)}' + "}"
        case 9:
            content[:8] = struct.pack("<Q", generator.choice((*_NUMBERS, length - 1, length + 1, len(content))))
            return content
        case _:
            for _ in range(generator.choice((1, 100, 10_000))):
                place = generator.randrange(max(len(data) // 2, 1)) * 2
                data[place : place + 2] = generator.choice((b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"))
    encoded = (text or json.dumps(header)).encode()
    return bytearray(struct.pack("<Q", len(encoded)) + encoded) + data
