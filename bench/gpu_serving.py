"""Speed of all services on the GPU as clients see it, the share of time in which the device is busy, and the speed of
transformers' continuous batching with the same requests and model."""

import asyncio
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.gpu_figures import Figure
from bench.gpu_model import config_of, write_made_model
from bench.serving import send_at_once
from bench.step_trace import busy_share
from quire.load import LoadRequest, Report
from quire.service.model_flag import ModelFlag
from quire_cli.supervisor import LocalServer, ServeSettings

NUM_REQUESTS = 64
OUTPUT_TOKENS = 256
_BLOCK_SIZE = 16
_SERVING_TIMEOUT_S = 120
_PEER_TIMEOUT_S = 150


def serving_figures(shape: str) -> Iterator[Figure]:
    """Quire without and with CUDA graphs, compared with transformers. A failure ends only its own measurement; raises
    all failures at the end, as one ExceptionGroup."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        directory = Path(folder)
        write_made_model(config_of(shape), directory, torch.device("cuda"))
        torch.cuda.empty_cache()
        work = make_requests(seed=1)
        title = f"{shape}, {NUM_REQUESTS} of {OUTPUT_TOKENS} tokens"
        rounds, failures = dict[str, Report](), list[Exception]()
        for name, cuda_graphs in (("eager", "off"), ("graphs", "on")):
            settings = ServeSettings(
                models=(ModelFlag(None, str(directory)),), device="cuda", dtype="bfloat16", cuda_graphs=cuda_graphs
            )
            try:
                report, busy = asyncio.run(serve(settings, work, directory / f"{name}.json"))
            except Exception as failure:
                failures.append(failure)
                continue
            rounds[name] = report
            yield Figure(f"device busy, {title}, {name}", "%", busy * 100, 100.0, report.duration_s * 1e6)
        try:
            peer = peer_tokens_per_s(directory, work)
        except Exception as failure:
            failures.append(failure)
            peer = math.nan
        for name, report in rounds.items():
            rates = report.output_tokens_per_s, peer
            yield Figure(f"served, {title}, {name} (ceiling: transformers)", "tok/s", *rates, report.duration_s * 1e6)
    if failures:
        raise ExceptionGroup(f"{len(failures)} failed", failures)


def make_requests(
    seed: int, count: int = NUM_REQUESTS, lengths: tuple[int, int] = (64, 512), output_tokens: int = OUTPUT_TOKENS
) -> list[LoadRequest]:
    """Prompts of random tokens, from the shortest to the longest of `lengths`; all outputs are equally long."""
    rng = np.random.default_rng(seed)
    shortest, longest = lengths
    return [
        LoadRequest(index, rng.integers(10, 1000, rng.integers(shortest, longest + 1), np.int32), output_tokens)
        for index in range(count)
    ]


async def serve(settings: ServeSettings, work: list[LoadRequest], trace: Path) -> tuple[Report, float]:
    """Runs all services on this machine, and one round of requests after a short warm-up round. Returns its report, and
    the share of time in which the device was in a step while all requests decoded. TimeoutError if it does not end: a
    service that dies at its start is restarted."""
    blocks = sum(-(-(len(item.prompt) + (item.output_len or 0) + 1) // _BLOCK_SIZE) for item in work)
    settings = replace(
        settings,
        grpc_port=0,
        http_port=0,
        block_size=_BLOCK_SIZE,
        num_gpu_blocks=blocks + len(work),
        max_num_seqs=len(work),
        watermark=0.0,
        trace_steps=str(trace),
        log_level="warning",
    )
    async with asyncio.timeout(_SERVING_TIMEOUT_S), LocalServer(settings) as server:
        await server.wait_ready()
        # Prompts as long as the measured ones, since another kernel attends to long contexts.
        longest = max(len(item.prompt) for item in work)
        warm_up = make_requests(seed=2, count=len(work), lengths=(min(8, longest), longest), output_tokens=16)
        await send_at_once(server.grpc_address, warm_up)
        report = await send_at_once(server.grpc_address, work)
    return report, busy_share(trace, len(work))


def peer_tokens_per_s(directory: Path, work: list[LoadRequest], device: str = "cuda") -> float:
    """Throughput of transformers, which runs in its own process, so that its memory is free afterwards."""
    requests = directory / "requests.json"
    prompts = [item.token_ids.tolist() for item in work]
    requests.write_text(json.dumps({"prompts": prompts, "tokens": work[0].output_len}))
    command = [sys.executable, "-m", "bench.gpu_transformers", str(directory), str(requests), device]
    run = subprocess.run(command, capture_output=True, text=True, timeout=_PEER_TIMEOUT_S)
    if run.returncode:
        raise RuntimeError(f"bench.gpu_transformers ended with {run.returncode}: {run.stderr[-2000:]}")
    return float(run.stdout.splitlines()[-1])
