"""A model, and requests whose answers are mostly in their prompts, to measure servers that look guesses up there:
`python -m bench copying DIR`, then `python -m bench servers` with `--load "--dataset DIR/requests.jsonl ..."`.

A prompt is a story of quire-tiny and the beginning of the same story once more, which quire-tiny goes on with nearly as
before. The model is quire-tiny within a larger shape, as in `python -m bench speculation`: the text is worth a guess,
and a step costs what it costs in the shape.
"""

import argparse
import asyncio
import itertools
import json
from pathlib import Path

from tokenizers import Tokenizer

from bench.padded_models import PADDED_SHAPES, write_padded_model
from bench.speculation import stories
from quire.client import AsyncClient, GenerationOptions
from quire.settings import load_settings
from quire_cli.supervisor import LocalServer, ServeSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="where `model` and `requests.jsonl` are written")
    parser.add_argument("--shape", choices=PADDED_SHAPES, default="llama-160m")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=120)


def main(arguments: argparse.Namespace) -> None:
    model = arguments.directory / "model"
    write_padded_model(arguments.shape, model)
    texts = asyncio.run(_texts(model, arguments.requests, arguments.output_len))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = [
        json.dumps({"prompt": tokenizer.encode(text).ids, "output_len": arguments.output_len}) + "\n" for text in texts
    ]
    (arguments.directory / "requests.jsonl").write_text("".join(lines))


async def _texts(model: Path, count: int, output_len: int) -> list[str]:
    settings = load_settings(
        ServeSettings, ["--grpc-port=0", "--http-port=0", f"--model={model}"], None, program="bench"
    )
    async with LocalServer(settings) as server:
        await server.wait_ready()
        async with AsyncClient(server.grpc_address) as client:
            options = GenerationOptions(temperature=0.0, max_tokens=output_len)
            beginnings = [asked.prompt for asked in itertools.islice(stories(0, output_len), count)]
            answers = await asyncio.gather(*(client.generate(each, options) for each in beginnings))
    return [f"{each}{answer.text}\n\n{each}" for each, answer in zip(beginnings, answers, strict=True)]
