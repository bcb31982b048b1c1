"""Speed of embeddings over HTTP: texts of 20 and of 256 tokens, one caller with 1 or 32 texts a call, and 32 callers.

Starts `quire serve` with a shape of random weights, written to `--files`. Servers named by `--peer` run already with
this model and have the same API; each load goes to all servers in turn, round by round, with new texts. The floor
is the time that the products take at the processor's peak (`bench.peak`) on all processors.

With `--chat`, one server has a chat model, too. The gaps between tokens of streams are measured by themselves, next to
a fifth of the embeddings that the server gives by itself, and next to 32 calls that always wait.
"""

import argparse
import http.client
import json
import math
import os
import random
import shlex
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

from bench.peak import Peak
from bench.report import Series, median_ratio, write_results
from bench.servers import named_server, run_load
from bench.serving import free_ports, model_of, quire_serve, served

_SHAPES = {
    "minilm-l6": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
}
_NUM_HEADS, _VOCAB_SIZE, _MAX_TOKENS = 12, 30522, 512
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, slots=True)
class Load:
    """Callers that each send calls of `batch` texts, one after the other, together at most `rate` texts a second."""

    tokens: int
    callers: int
    batch: int
    rate: float = math.inf

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.callers} callers, {self.batch} a call"


@dataclass(frozen=True, slots=True)
class Run:
    texts_per_s: float
    latencies: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=Path, required=True, help="directory for the model and the log")
    parser.add_argument("--shape", choices=_SHAPES, default="minilm-l6")
    parser.add_argument("--write-only", action="store_true", help="write the model, for peers to serve, and end")
    parser.add_argument("--peer", action="append", default=[], type=named_server, metavar="NAME=URL")
    parser.add_argument("--tokens", type=int, nargs="+", default=[20, 256], help="of a text")
    parser.add_argument("--calls", nargs="+", default=["1x1", "1x32", "32x1"], help="callers, and texts of a call")
    parser.add_argument("--chat", metavar="SHAPE", help="measure streams of a model of this shape next to embeddings")
    parser.add_argument("--streams", type=int, default=4, help="with --chat")
    parser.add_argument("--output-len", type=int, default=128, help="of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load, server and round")
    parser.add_argument("--flags", default="--dtype=bfloat16", help="further flags of `quire serve`")


def main(arguments: argparse.Namespace) -> None:
    model: Path = arguments.files / arguments.shape
    if not model.exists():
        _write_model(model, arguments.shape)
    if arguments.write_only:
        return
    if arguments.chat:
        _next_to_chats(arguments, model)
        return
    loads = [Load(tokens, *map(int, each.split("x"))) for tokens, each in product(arguments.tokens, arguments.calls)]
    (port,) = free_ports(1)
    command = quire_serve(model, port, *shlex.split(arguments.flags))
    servers = {"quire": f"http://127.0.0.1:{port}", **dict(arguments.peer)}
    runs: dict[tuple[Load, str], list[Run]] = {each: [] for each in product(loads, servers)}
    peaks: list[float] = []
    with tempfile.TemporaryDirectory() as made, served(command, port, arguments.files / "quire.log"):
        peak = Peak(Path(made), os.cpu_count() or 1)
        for index in range(arguments.rounds):
            peaks.append(peak.gigaflops())
            for (load, name), found in runs.items():
                found.append(_run(servers[name], load, lambda elapsed: elapsed >= arguments.seconds, seed=index))
                print(f"{name}, {load}: {found[-1].texts_per_s:.0f} texts/s", flush=True)
    series = [Series("peak", "GFLOP/s", tuple(peaks))]
    for (load, name), found in runs.items():
        series.append(Series(f"{name}, {load}", "texts/s", tuple(each.texts_per_s for each in found)))
        for place in (50, 99):
            times = (1e3 * statistics.quantiles(each.latencies * 2, n=100)[place - 1] for each in found)
            series.append(Series(f"{name}, {load}, p{place}", "ms", tuple(times)))
    by_name = {each.name: each for each in series}
    ratios: dict[str, dict[str, float]] = {}
    for load in loads:
        own = by_name[f"quire, {load}"]
        ratios[str(load)] = {name: median_ratio(own, by_name[f"{name}, {load}"]) for name, _ in arguments.peer}
        ratios[str(load)]["floor"] = own.median * _gigaflops_of_text(arguments.shape, load.tokens) / series[0].median
    print(*series, *(f"{load}: {ratio}" for load, ratio in ratios.items()), sep="\n")
    write_results(arguments.out, f"embeddings of {arguments.shape}", series, ratio_to=ratios)


def _next_to_chats(arguments: argparse.Namespace, model: Path) -> None:
    (port,) = free_ports(1)
    url, flags = f"http://127.0.0.1:{port}", shlex.split(arguments.flags)
    command = quire_serve(model_of(arguments.chat, arguments.files), port, f"--model=vectors={model}", *flags)
    all_of_them = Load(arguments.tokens[0], 32, 1)
    chats = f"--model={arguments.chat} --max-concurrency={arguments.streams} --num-requests={arguments.streams}"
    chats += f" --dataset=fixed --vocab-size=4000 --prompt-len=64 --output-len={arguments.output_len}"
    found = defaultdict[tuple[str, str], list[float]](list)
    with served(command, port, arguments.files / "quire.log"), ThreadPoolExecutor(1) as threads:
        for index in range(arguments.rounds):
            by_itself = _run(url, all_of_them, lambda elapsed: elapsed >= arguments.seconds, seed=index).texts_per_s
            found["embeddings by themselves", "texts/s"].append(by_itself)
            for name, rate in (("by themselves", 0.0), ("next to a fifth", by_itself / 5), ("next to all", math.inf)):
                is_over, running = threading.Event(), None
                if rate:
                    load = replace(all_of_them, rate=rate)
                    running = threads.submit(_run, url, load, lambda _, over=is_over: over.is_set(), seed=index)
                with tempfile.TemporaryDirectory() as made:
                    report = run_load("chats", url, index, chats, Path(made) / "report.json").runs[0].report
                is_over.set()
                assert report.itl is not None, "gaps of streams"
                for place in ("p50", "p99"):
                    found[f"chats {name}, {place}", "ms"].append(1e3 * getattr(report.itl, place))
                if running is not None:
                    found[f"embeddings {name}", "texts/s"].append(running.result().texts_per_s)
                print(*(f"{each}: {values[-1]:.1f} {unit}" for (each, unit), values in found.items()), flush=True)
    series = {name: Series(name, unit, tuple(values)) for (name, unit), values in found.items()}
    base = {"chats": series["chats by themselves, p99"], "embeddings": series["embeddings by themselves"]}
    pairs = {name: base[name.split()[0]] for name in series if "next" in name and "p50" not in name}
    ratios = {name: median_ratio(series[name], other) for name, other in pairs.items()}
    print(*series.values(), ratios, sep="\n")
    write_results(arguments.out, f"chats of {arguments.chat} next to embeddings", [*series.values()], ratio_to=ratios)


def _gigaflops_of_text(shape: str, tokens: int) -> float:
    sizes = _SHAPES[shape]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    of_token = 4 * hidden * hidden + 2 * hidden * inner + 2 * tokens * hidden
    return 2e-9 * sizes["num_hidden_layers"] * tokens * of_token


def _run(url: str, load: Load, is_over: Callable[[float], bool], seed: int) -> Run:
    """Sends calls until `is_over` of the elapsed seconds, at least one, after one second that does not count."""
    began = threading.Barrier(load.callers)

    def call(caller: int) -> tuple[int, float, list[float]]:
        draw, latencies = random.Random(f"{seed} {caller} {load}"), list[float]()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        began.wait()
        start = first = time.perf_counter() + 1.0
        interval = load.callers * load.batch / load.rate
        due = start - 1.0 + interval * draw.random()
        while not is_over(time.perf_counter() - start) or not latencies:
            time.sleep(max(0.0, due - time.perf_counter()))
            due, now = due + interval, time.perf_counter()
            texts = [_text(draw, load.tokens) for _ in range(load.batch)]
            body = json.dumps({"model": "", "input": texts, "encoding_format": "base64"})
            connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{url} answers {answer.status}: {content[:500]!r}")
            if now >= start:
                first = first if latencies else now
                latencies.append(time.perf_counter() - now)
        # A caller with a rate also waits between its calls.
        first = first if load.rate == math.inf else start
        return load.batch * len(latencies), time.perf_counter() - first, latencies

    with ThreadPoolExecutor(load.callers) as threads:
        results = list(threads.map(call, range(load.callers)))
    rate = sum(count / elapsed for count, elapsed, _ in results)
    return Run(rate, [each for _, _, latencies in results for each in latencies])


def _text(draw: random.Random, tokens: int) -> str:
    """A text of this number of tokens, with the two around it."""
    return " ".join(f"w{draw.randrange(_VOCAB_SIZE - len(_SPECIAL))}" for _ in range(tokens - 2))


def _write_model(path: Path, shape: str) -> None:
    """Writes the model as sentence-transformers saves one."""
    import transformers
    from transformers.models.bert.tokenization_bert import BertTokenizer

    transformers.set_seed(1)
    sizes = {"num_attention_heads": _NUM_HEADS, "max_position_embeddings": _MAX_TOKENS, **_SHAPES[shape]}
    config = transformers.BertConfig(vocab_size=_VOCAB_SIZE, **sizes)
    transformers.BertModel(config).save_pretrained(path)
    pieces = [*_SPECIAL, *(f"w{number}" for number in range(_VOCAB_SIZE - len(_SPECIAL)))]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    BertTokenizer(vocab=vocabulary, model_max_length=_MAX_TOKENS).save_pretrained(path)
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    listed = [
        {"idx": number, "name": name, "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for number, (name, folder, kind) in enumerate(modules)
    ]
    (path / "1_Pooling").mkdir()
    (path / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": sizes["hidden_size"], "pooling_mode_mean_tokens": True}
    for name, content in (("modules.json", listed), ("1_Pooling/config.json", pooling)):
        (path / name).write_text(json.dumps(content))
