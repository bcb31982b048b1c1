"""Quire's share of the machine's own floor, load by load: whole servers, with gRPC clients on the same cores.

A floor is the time of passes that a load takes at least: prompts first, in passes of `--max-num-batched-tokens`, then a
pass for each further token of all streams. In a pass the products of the layers, the output layer and attention follow
one another. Each takes at least the longer of two times: its bytes at the rate at which the same threads read memory,
and its operations at the rate of products whose operands stay in registers (`peak.c`). Sampling, text, messages and
clients have no floor. Both rates are measured before and after each load; the better ones count.

`--out` keeps the figures of other cells.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, product, starmap
from pathlib import Path

import torch

from bench.models import write_model
from bench.peak import Peak
from bench.report import Series, add_results
from bench.serving import send_at_once
from bench.stages import Passes
from quire.load import fixed, take
from quire.service.model_flag import ModelFlag
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_kernels.cpu.bindings import ProductShape
from quire_kernels.cpu.library import Operation
from quire_kernels.packed_weight import Quantization
from quire_kernels.recording import Recording, record
from worker_svc.models.base import NativeCausalLM
from worker_svc.models.registry import load_model

_BUDGET, _SHORT, _LONG = 2048, 100, 1500
_SAMPLING = {"greedy": {"temperature": 0.0}, "top-p": {"temperature": 0.8, "top_p": 0.95}}
_DTYPES = {"bfloat16": Quantization.NONE, "int8": Quantization.INT8_DYNAMIC}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["llama-160m", "qwen2-0.5b", "llama-1.1b"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=_DTYPES, default=[*_DTYPES], help="int8: --quantization int8-dynamic"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[_SHORT, _LONG], help="tokens")
    parser.add_argument("--sampling", nargs="+", choices=_SAMPLING, default=[*_SAMPLING])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=Path, help="directory for models, which otherwise vanish")


def main(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        files = arguments.files or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for shape, dtype in product(arguments.shapes, arguments.dtypes):
            if not (model := files / shape).exists():
                write_model(shape, model)
            (made / dtype).mkdir(exist_ok=True)
            threads = torch.get_num_threads()
            peaks = Peak(made, threads), Peak(made / dtype, threads, is_int8=dtype == "int8")
            work = Work.of(model, _DTYPES[dtype])
            asyncio.run(_measure(f"{shape}, {dtype}", model, work, peaks, arguments, _DTYPES[dtype]))


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates: bytes a second, and operations a second in bfloat16 and in the dtype of the layers' products."""

    read: float
    plain: float
    layers: float

    @classmethod
    def measure(cls, plain: Peak, layers: Peak) -> "Rates":
        return cls(plain.gigabytes() * 1e9, plain.gigaflops() * 1e9, layers.gigaflops() * 1e9)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes of a pass and operations of a token, of the products of all layers and of the output layer; bytes and
    operations of a token and a token that it attends to."""

    layer_bytes: int
    layer_flops: int
    head_bytes: int
    head_flops: int
    kv_bytes: int
    pair_flops: int

    @classmethod
    def of(cls, directory: Path, quantization: Quantization) -> "Work":
        model = load_model(directory, device=torch.device("cpu"), dtype=torch.bfloat16, quantization=quantization)
        assert isinstance(model, NativeCausalLM)
        passes = Passes(model, 1, 16, model.dtype)
        layers = _products(passes.recording)
        hidden = torch.zeros(1, layers[0].in_features, dtype=model.dtype)
        (head,) = _products(record(1, lambda: (model.outputs(hidden), None)[1]))
        attention = [each.arguments for each in passes.recording.calls if each.operation is Operation.PAGED_ATTENTION]
        return cls(
            sum(each.weight_bytes for each in layers),
            sum(2 * each.in_features * each.out_features for each in layers),
            head.weight_bytes,
            2 * head.in_features * head.out_features,
            passes.kv_bytes(1) // passes.context,
            sum(4 * each.num_heads * each.head_dim for each in attention),
        )

    def seconds(self, rates: Rates, new: int, sampled: int, read: int, pairs: int) -> float:
        """The floor of a pass of `new` tokens. Attention reads `read` tokens, and attends to `pairs` of a new token and
        one before it."""
        return (
            max(self.layer_bytes / rates.read, new * self.layer_flops / rates.layers)
            + (max(self.head_bytes / rates.read, sampled * self.head_flops / rates.plain) if sampled else 0.0)
            + max(read * self.kv_bytes / rates.read, pairs * self.pair_flops / rates.plain)
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come at once."""

    streams: int
    prompt: int
    sampling: str

    @property
    def output(self) -> int:
        return 48 if self.streams >= 64 else 64

    @property
    def requests(self) -> int:
        return min(self.streams, 16) if self.prompt > 1000 else self.streams

    def floor_s(self, work: Work, rates: Rates) -> float:
        left, seconds = self.requests * self.prompt, 0.0
        # Tokens of a prompt attend to half of it.
        while left > 0:
            new = min(left, _BUDGET)
            seconds += work.seconds(rates, new, new // self.prompt, new, new * self.prompt // 2)
            left -= new
        for length in range(self.prompt + 1, self.prompt + self.output):
            read = self.requests * length
            seconds += work.seconds(rates, self.requests, self.requests, read, read)
        return seconds

    def __str__(self) -> str:
        return f"{self.streams} {self.sampling}, prompt {self.prompt}"


async def _measure(
    name: str,
    model: Path,
    work: Work,
    peaks: tuple[Peak, Peak],
    arguments: argparse.Namespace,
    quantization: Quantization,
) -> None:
    settings = ServeSettings(
        models=(ModelFlag(source=str(model)),),
        grpc_port=0,
        http_port=0,
        max_num_seqs=64,
        max_model_len=2048,
        max_num_batched_tokens=_BUDGET,
        kv_cache_memory=2 << 30,
        quantization=quantization.value,
        speculate=("off",),
    )
    async with LocalServer(settings) as server:
        await server.wait_ready()
        seeds = count()
        await send_at_once(server.grpc_address, take(fixed(_SHORT, 8, vocab_size=8000), 8, seed=next(seeds)))
        for load in starmap(Load, product(arguments.streams, arguments.prompts, arguments.sampling)):
            shares, seconds, rates = list[float](), list[float](), [Rates.measure(*peaks)]
            for _ in range(arguments.rounds):
                # No prompt is in the prefix cache.
                requests = take(fixed(load.prompt, load.output, vocab_size=8000), load.requests, seed=next(seeds))
                report = await send_at_once(server.grpc_address, requests, **_SAMPLING[load.sampling])
                rates.append(Rates.measure(*peaks))
                seconds.append(report.duration_s)
                shares.append(load.floor_s(work, _best(rates[-2:])) / report.duration_s)
            series, best = Series(f"{name}, {load}", "of the floor", tuple(shares)), _best(rates)
            print(f"{series}   {best.read / 1e9:.1f} GB/s, {best.layers / 1e9:.0f} GFLOP/s", flush=True)
            cell = {
                "tokens_per_s": load.requests * load.output / statistics.median(seconds),
                "gigabytes_per_s": best.read / 1e9,
                "gigaflops_per_s": best.layers / 1e9,
            }
            add_results(arguments.out, "shares of the machine's floor", [series], cells={series.name: cell})


def _best(rates: Sequence[Rates]) -> Rates:
    return Rates(*(max(getattr(each, name) for each in rates) for name in ("read", "plain", "layers")))


def _products(recording: Recording) -> list[ProductShape]:
    return [ProductShape.of(each.arguments) for each in recording.calls if each.operation is Operation.PRODUCT]
