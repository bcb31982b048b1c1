"""Models whose layers keep states, as they are served: turns of a conversation, forks, drafts, a killed worker, the
first token of a turn, and what checkpoints cost.

Starts `quire serve` for each part. Parts that count tokens and blocks use two tiny models, and the others the shape
qwen3.5-0.8b in bfloat16; all weights are random. `--peer` names servers of OpenAI's API that have the model of
`--files`, too, and get the same two turns. Exits with 1 if a bound is exceeded.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx

from bench.cluster import services_of
from bench.report import Series, median_ratio, write_results
from bench.serving import free_ports, model_of, quire_serve, served
from bench.step_trace import device_seconds, read_events

_TINY, _SHAPE = ("qwen3.5-tiny", "lfm2-tiny"), "qwen3.5-0.8b"
_TIMEOUT_S = 600
_BLOCK, _OUTPUT_INTERVAL, _IN_FLIGHT = 16, 64, 4
"""Tokens of a block, tokens between checkpoints of output, and tokens of two steps and of their seals."""


@dataclass(slots=True)
class Figures:
    series: list[Series] = field(default_factory=list[Series])
    exceeded: list[str] = field(default_factory=list[str])

    def add(self, name: str, unit: str, *values: float, most: float | None = None, least: float | None = None) -> None:
        """Prints and keeps a figure, whose median should be at most or at least this."""
        each = Series(name, unit, values)
        holds = (most is None or each.median <= most) and (least is None or each.median >= least)
        bound = "" if most is None and least is None else f"at most {most}" if least is None else f"at least {least}"
        print(each, bound, "" if holds else "EXCEEDED", flush=True)
        self.series.append(each)
        if not holds:
            self.exceeded.append(f"{name}: {each.median:.3f}, {bound}")


@dataclass(slots=True)
class Answer:
    began: float
    token_ids: list[int] = field(default_factory=list[int])
    first: float = 0.0
    end: float = 0.0
    cached: int = 0

    @property
    def first_s(self) -> float:
        return self.first - self.began

    @property
    def decode_s(self) -> float:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    url: str
    metrics: str
    trace: Path

    def metric(self, name: str) -> float:
        lines = httpx.get(self.metrics, timeout=_TIMEOUT_S).text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))

    def used_blocks(self) -> int:
        return round(self.metric('quire_scheduler_gpu_blocks{state="used"}'))

    def traced(self, name: str) -> list[dict[str, Any]]:
        """Events of this name in the trace of steps, for a server that has ended."""
        return [each for each in read_events(self.trace) if each["name"] == name]


def ask(
    url: str, prompt: str | list[int], max_tokens: int, on_token: Callable[[], object] = int, **more: Any
) -> Answer:
    """Streams a greedy completion. RuntimeError if it fails."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, **more}
    answer = Answer(time.perf_counter())
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=_TIMEOUT_S) as response:
        if response.status_code != 200:
            raise RuntimeError(response.read().decode())
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("error"):
                raise RuntimeError(event["error"])
            if event.get("choices"):
                answer.first, answer.end = answer.first or time.perf_counter(), time.perf_counter()
                answer.token_ids += event["choices"][0].get("token_ids") or ()
                on_token()
            if usage := event.get("usage"):
                answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=Path, help="directory for models, logs and traces, which otherwise vanish")
    parser.add_argument(
        "--parts", nargs="+", choices=[*_OF_TINY, *_TIMED], default=[*_OF_TINY, *_TIMED], help="what to measure"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each measurement of time, in turn")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="another server, for the part first-token"
    )


def main(arguments: argparse.Namespace) -> None:
    figures = Figures()
    with ExitStack() as stack:
        if arguments.files is None:
            arguments.files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arguments.files.mkdir(parents=True, exist_ok=True)
        _measure(figures, arguments)
    write_results(arguments.out, "models with states, as served", figures.series, exceeded=figures.exceeded)
    if figures.exceeded:
        raise SystemExit("\n".join(figures.exceeded))


def _measure(figures: Figures, arguments: argparse.Namespace) -> None:
    for name in arguments.parts:
        began = time.monotonic()
        if name in _OF_TINY:
            for shape in _TINY:
                _OF_TINY[name](figures, arguments.files, shape)
        else:
            _TIMED[name](figures, arguments)
        figures.add(f"{name}, time of the part", "s", time.monotonic() - began)


@contextmanager
def _serve(files: Path, shape: str, name: str, *flags: str) -> Iterator[Server]:
    """A server of this shape, which is written at its first use, with a log and a trace of this name."""
    http, metrics = free_ports(2)
    trace = files / f"{name}-steps.json"
    model = model_of(shape, files, whole_vocabulary=True)
    own = (f"--scheduler-metrics-port={metrics}", f"--trace-steps={trace}", "--step-timeout=300")
    with served(quire_serve(model, http, *own, *flags), http, files / f"{name}.log") as pid:
        ask(url := f"http://127.0.0.1:{http}", [5] * 20, 1)
        yield Server(pid, url, f"http://127.0.0.1:{metrics}/metrics", trace)


def _tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(300, 4000), k=count)


def _words(count: int, seed: int) -> str:
    """A text of this number of tokens: words of two letters, each after a space."""
    draw = random.Random(seed)
    return "".join(f" {draw.choice(ascii_lowercase)}{draw.choice(ascii_lowercase)}" for _ in range(count))


def _turns(figures: Figures, files: Path, shape: str) -> None:
    """Tokens of earlier turns that a turn computes again."""
    most, num_answer = _OUTPUT_INTERVAL + _BLOCK, 200
    # Two conversations and their checkpoints fill the pool.
    with _serve(files, shape, f"turns-{shape}", "--max-num-seqs=4", "--num-gpu-blocks=4450") as server:
        text = _tokens(32_000, 1)
        answer = ask(server.url, text, num_answer).token_ids
        half = [*text, *answer[: num_answer // 2]]
        text += answer

        def turn(name: str, old: list[int]) -> list[int]:
            done = ask(server.url, [*old, *_tokens(100, len(old))], num_answer)
            figures.add(f"{shape}, {name}: old tokens computed", "tokens", len(old) - done.cached, most=most)
            return [*old, *_tokens(100, len(old)), *done.token_ids]

        text = turn("turn 2", text)
        turn("turn 2 from within the answer", half)
        text = turn("turn 3", text)
        with ThreadPoolExecutor() as pool:
            other = pool.submit(ask, server.url, _tokens(32_000, 2), num_answer)
            while server.used_blocks() < 32_000 // _BLOCK and not other.done():
                time.sleep(0.01)
            text = turn("turn 4 while another prompt fills the pool", text)
            other.result()
        turn("turn 5 after it", text)


def _forks(figures: Figures, files: Path, shape: str) -> None:
    """Blocks of 32 sequences of one prompt, against one copy of the prompt, a state and a partial block each."""
    num_forks, num_prompt = 32, 8_005
    with _serve(files, shape, f"forks-{shape}", "--max-num-seqs=32", "--num-gpu-blocks=18000") as server:
        peak, is_over = [0], threading.Event()

        def watch() -> None:
            while not is_over.is_set():
                peak.append(server.used_blocks())

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                ask(server.url, _tokens(num_prompt, 1), 11, n=num_forks)
            finally:
                is_over.set()
            watching.result()
    size = server.traced("replica")[0]["args"]["state_blocks"]
    needed = num_prompt // _BLOCK + num_forks * size + num_forks
    figures.add(f"{shape}, 32 forks: blocks at most", "blocks", max(peak))
    figures.add(f"{shape}, 32 forks: blocks / needed", "", max(peak) / needed, most=1.05)


def _kill(figures: Figures, files: Path, shape: str) -> None:
    """Tokens that are computed again after `kill -9` of the worker under four streams of 16,000 tokens."""
    num_streams, num_prompt, num_answer = 4, 16_000, 200
    flags = ("--max-num-seqs=4", "--num-gpu-blocks=12000", "--persistent-kv-cache=on", "--multi-step-ms=0")
    with _serve(files, shape, f"kill-{shape}", "--speculate=off", *flags) as server:
        before, counts = server.metric("quire_scheduler_batched_tokens_total"), [0] * num_streams

        def stream(index: int) -> list[int]:
            def count() -> None:
                counts[index] += 1

            return ask(server.url, _tokens(num_prompt, index), num_answer, count).token_ids

        def undisturbed(index: int) -> list[int]:
            return ask(server.url, _tokens(num_prompt, index), num_answer, cache_salt="cold").token_ids

        with ThreadPoolExecutor(num_streams) as pool:
            streams = [pool.submit(stream, index) for index in range(num_streams)]
            while min(counts) < num_answer // 4 and not any(each.done() for each in streams):
                time.sleep(0.001)
            os.kill(services_of(server.pid, "0")["worker-0"], signal.SIGKILL)
            texts = [each.result() for each in streams]
        computed = server.metric("quire_scheduler_batched_tokens_total") - before
        again = computed - num_streams * (num_prompt + num_answer - 1)
        most = _OUTPUT_INTERVAL + _IN_FLIGHT
        figures.add(f"{shape}, kill: computed again", "tokens a stream", again / num_streams, most=most)
        num_changed = sum(map(list.__ne__, texts, map(undisturbed, range(num_streams))))
        figures.add(f"{shape}, kill: texts that changed", "", num_changed, most=0)


def _drafts(figures: Figures, arguments: argparse.Namespace) -> None:
    """Speed of an answer that repeats itself, with and without drafts from the text."""
    num_answer, rates = 128, dict[str, list[float]]()
    with ExitStack() as stack:
        servers = {
            speculate: stack.enter_context(
                _serve(arguments.files, _SHAPE, f"drafts-{speculate}", *_ONE_STREAM, f"--speculate={speculate}")
            )
            for speculate in ("ngram", "off")
        }
        for index in range(arguments.rounds):
            answers = {
                # The same token again and again: with random weights no other text repeats itself.
                name: ask(each.url, _words(200, index), num_answer, allowed_token_ids=[500])
                for name, each in servers.items()
            }
            if answers["ngram"].token_ids != answers["off"].token_ids:
                figures.exceeded.append("drafts changed a text")
            for name, answer in answers.items():
                rates.setdefault(name, []).append((num_answer - 1) / answer.decode_s)
    series = [Series(f"drafts {name}", "tokens/s", tuple(each)) for name, each in rates.items()]
    figures.series += series
    figures.add("drafts ngram / off", "", median_ratio(*series), least=1.5)


def _first_token(figures: Figures, arguments: argparse.Namespace) -> None:
    """The first token of turn 2, against the step that computes as many tokens at the end of the same prompt cold."""
    num_old, num_new, rounds = 16_384, 200, range(1, arguments.rounds + 2)
    old = _words(num_old + num_new, 0)
    with _serve(arguments.files, _SHAPE, "first-token", *_ONE_STREAM, "--speculate=off") as server:
        ask(server.url, old, 1)
        turns = [ask(server.url, old + _words(num_new, index), 1) for index in rounds]
    seconds = device_seconds(read_events(server.trace))
    plans = [each["args"] for each in server.traced("plan")]
    # The last step of each prompt.
    cold, *steps = (seconds[each["step"]] for each in plans if each["num_samples"] and each["context_tokens"] > num_old)
    figures.add("first token: the last 200 of 16,584 tokens, cold", "s", cold)
    figures.add("first token: old tokens computed", "tokens", *(num_old + num_new - each.cached for each in turns))
    figures.add("first token: step of turn 2", "s", *steps)
    figures.add("first token: turn 2", "s", *(each.first_s for each in turns))
    figures.add("first token: turn 2 / cold step", "", *(each.first_s / cold for each in turns), most=1.3)
    for name, _, url in (each.partition("=") for each in arguments.peer):
        figures.add(f"first token: {name}, turn 1", "s", ask(url, old, 1).first_s)
        answers = [ask(url, old + _words(num_new, index), 1) for index in rounds]
        figures.add(f"first token: {name}, turn 2", "s", *(each.first_s for each in answers))
        figures.add(f"first token: {name}, tokens cached", "tokens", *(each.cached for each in answers))


def _checkpoints(figures: Figures, arguments: argparse.Namespace) -> None:
    """Tokens a second with checkpoints of output and without."""
    num_answer, flags = 128, ("--kv-cache-memory=3GiB", "--max-num-seqs=32", "--max-model-len=1024", "--speculate=off")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                _serve(arguments.files, _SHAPE, f"checkpoints{switch}", *flags, f"--{switch}output-checkpoints")
            )
            for switch in ("", "no-")
        ]
        for num_streams in (1, 32):
            rates: tuple[list[float], ...] = ([], [])
            for index in range(arguments.rounds):
                # The first server goes first in every other round.
                for which in (0, 1) if index % 2 else (1, 0):
                    prompts = [_words(30, 100 * index + each) for each in range(num_streams)]
                    with ThreadPoolExecutor(num_streams) as pool:
                        url = servers[which].url
                        answers = list(pool.map(lambda prompt, url=url: ask(url, prompt, num_answer), prompts))
                    seconds = max(each.end for each in answers) - min(each.first for each in answers)
                    rates[which].append(num_streams * (num_answer - 1) / seconds)
            series = [
                Series(f"{num_streams} streams, {name} checkpoints", "tokens/s", tuple(each))
                for name, each in zip(("with", "without"), rates, strict=True)
            ]
            for each in series:
                figures.add(each.name, each.unit, *each.values)
            figures.add(f"{num_streams} streams, with / without checkpoints", "", median_ratio(*series), least=0.97)


def _disk(figures: Figures, files: Path, shape: str) -> None:
    """States that go to disk with a long answer, and the turn after a restart."""
    num_prompt, num_answer, worker = 4_000, 1_000, free_ports(1)[0]
    with tempfile.TemporaryDirectory(dir=files) as directory:
        flags = ["--max-num-seqs=4", "--num-gpu-blocks=4000", "--speculate=off", f"--kv-disk={directory}"]
        with _serve(files, shape, f"disk-{shape}", *flags, f"--worker-metrics-port={worker}") as server:
            text, written = _tokens(num_prompt, 1), list[float]()
            of_worker = replace(server, metrics=f"http://127.0.0.1:{worker}/metrics")
            for max_tokens in (1, num_answer):
                answer = ask(server.url, text, max_tokens).token_ids
                time.sleep(1)
                written.append(of_worker.metric('quire_worker_kv_disk_bytes_total{what="written"}'))
            free = [server.metric(f'quire_scheduler_gpu_{what}{{state="free"}}') for what in ("bytes", "blocks")]
        text += answer
        with _serve(files, shape, f"disk-again-{shape}", *flags) as again:
            num_again = len(text) - ask(again.url, [*text, *_tokens(100, 3)], 1).cached
    blocks = (written[1] - written[0]) / (free[0] / free[1])
    states = (blocks - num_answer // _BLOCK) / server.traced("replica")[0]["args"]["state_blocks"]
    figures.add(f"{shape}, disk: states of an answer of 1,000 tokens", "states", states, most=2.1)
    figures.add(
        f"{shape}, turn after a restart: old tokens computed", "tokens", num_again, most=_OUTPUT_INTERVAL + _BLOCK
    )


_ONE_STREAM = ("--max-num-seqs=2", "--kv-cache-memory=2GiB")
_OF_TINY = {"turns": _turns, "forks": _forks, "kill": _kill, "disk": _disk}
_TIMED = {"drafts": _drafts, "first-token": _first_token, "checkpoints": _checkpoints}
