"""Speed of embeddings over HTTP: texts of 20 and of 256 tokens, one caller with 1 or 32 texts a call, and 32 callers.

Starts `quire serve` with a shape of random weights, written to `--files`. Servers named by `--peer` run already with
this model and have the same API; each load goes to all servers in turn, round by round, with new texts. The floor
is the time that the products take at the processor's peak (`bench.peak`) on all processors.
"""

import argparse
import http.client
import json
import os
import random
import shlex
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.peak import Peak
from bench.report import Series, median_ratio, write_results
from bench.servers import named_server
from bench.serving import free_ports, quire_serve, served

_SHAPES = {
    "minilm-l6": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
}
_NUM_HEADS, _VOCAB_SIZE, _MAX_TOKENS = 12, 30522, 512
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, slots=True)
class Load:
    """Callers that each send calls of `batch` texts, one call after the other."""

    tokens: int
    callers: int
    batch: int

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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load, server and round")
    parser.add_argument("--flags", default="--dtype=bfloat16", help="further flags of `quire serve`")


def main(arguments: argparse.Namespace) -> None:
    model: Path = arguments.files / arguments.shape
    if not model.exists():
        _write_model(model, arguments.shape)
    if arguments.write_only:
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
                found.append(_run(servers[name], load, arguments.seconds, seed=index))
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


def _gigaflops_of_text(shape: str, tokens: int) -> float:
    sizes = _SHAPES[shape]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    of_token = 4 * hidden * hidden + 2 * hidden * inner + 2 * tokens * hidden
    return 2e-9 * sizes["num_hidden_layers"] * tokens * of_token


def _run(url: str, load: Load, seconds: float, seed: int) -> Run:
    """Sends calls for some seconds, at least one, after one second that does not count."""
    began = threading.Barrier(load.callers)

    def call(caller: int) -> tuple[int, float, list[float]]:
        draw, latencies = random.Random(f"{seed} {caller} {load}"), list[float]()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        began.wait()
        start = first = time.perf_counter() + 1.0
        while (now := time.perf_counter()) < start + seconds or not latencies:
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
    import tokenizers
    import transformers

    sizes: dict[str, Any] = {
        **_SHAPES[shape],
        "num_attention_heads": _NUM_HEADS,
        "max_position_embeddings": _MAX_TOKENS,
    }
    transformers.set_seed(1)
    config = transformers.BertConfig(vocab_size=_VOCAB_SIZE)
    config.update(sizes)
    transformers.BertModel(config).save_pretrained(path)
    pieces = [*_SPECIAL, *(f"w{number}" for number in range(_VOCAB_SIZE - len(_SPECIAL)))]
    words = tokenizers.models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", "$A $B", ends)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special: dict[str, Any] = dict(zip(names, _SPECIAL, strict=True))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=_MAX_TOKENS, model_input_names=["input_ids", "attention_mask"]
    )
    wrapped.add_special_tokens(special)
    wrapped.save_pretrained(path)
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
