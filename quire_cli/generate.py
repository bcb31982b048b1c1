"""`quire generate`: one prompt, streamed; or a file of prompts, run concurrently and printed in order."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.client import AsyncClient, Client, Generation, QuireError, RetryPolicy, SequenceFinished, Stream, TokenChunk
from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire_cli.flags import GenerationFlags, read_text

PROGRAM = "quire generate"


@dataclass(frozen=True, slots=True)
class GenerateFlags(GenerationFlags):
    """Continues a prompt: the argument, the lines of --file, or all of stdin."""

    prompt: str | None = setting(None, "the prompt; without it and without --file, all of stdin", positional=True)
    file: str | None = setting(None, "prompts, one per line; - is stdin", metavar="FILE")
    format: str = setting("text", "how to print answers", choices=("text", "json"))
    concurrency: int = setting(64, "maximum number of prompts of --file that run at once", minimum=1)


def main(argv: Sequence[str]) -> int:
    """Prints the answers; 1 when a prompt of --file failed."""
    flags = load_settings(GenerateFlags, argv, os.environ, program=PROGRAM)
    if flags.file is not None:
        if flags.prompt is not None:
            raise ConfigurationError("give a prompt or --file, not both")
        return asyncio.run(_run_all(_read_prompts(flags.file), flags))
    prompt = flags.prompt if flags.prompt is not None else read_text("-").removesuffix("\n")
    if not prompt:
        raise ConfigurationError("the prompt is empty; give one as argument, by --file or on stdin")
    with (
        Client(flags.address, api_key=flags.api_key, tls=flags.client_tls()) as client,
        client.generate_stream(prompt, flags.options(), model=flags.model) as stream,
    ):
        if flags.format == "json":
            _print_json(_collect(prompt, stream))
        else:
            for piece in stream.text:
                print(piece, end="", flush=True)
            print()
    return 0


def _collect(prompt: str, stream: Stream) -> dict[str, Any]:
    """A whole stream as the JSON object of one answer."""
    text: list[str] = []
    token_ids: list[int] = []
    finish_reason = None
    for event in stream:
        if isinstance(event, TokenChunk):
            text.append(event.text)
            token_ids.extend(event.token_ids)
        elif isinstance(event, SequenceFinished):
            finish_reason = str(event.finish_reason)
    return {"prompt": prompt, "text": "".join(text), "token_ids": token_ids, "finish_reason": finish_reason}


def _read_prompts(file: str) -> list[str]:
    """The lines that are not blank."""
    prompts = [line for line in read_text(file).split("\n") if line.strip()]
    if not prompts:
        raise ConfigurationError(f"{file} holds no prompt")
    return prompts


async def _run_all(prompts: Sequence[str], flags: GenerateFlags) -> int:
    """Runs all prompts concurrently and prints each answer as soon as those before it are printed."""
    try:
        return await _print_all(prompts, flags)
    except BaseExceptionGroup as group:
        # `quire` reports errors of writing; it does not look into groups.
        if (unwritten := group.subgroup(OSError)) is not None:
            raise unwritten.exceptions[0] from None
        raise


async def _print_all(prompts: Sequence[str], flags: GenerateFlags) -> int:
    slots = asyncio.Semaphore(flags.concurrency)
    failed = False
    # A full queue empties, so the command waits as long as that takes.
    retry = RetryPolicy(attempts=None)
    async with (
        AsyncClient(flags.address, api_key=flags.api_key, tls=flags.client_tls(), retry=retry) as client,
        asyncio.TaskGroup() as tasks,
    ):
        answers = [tasks.create_task(_run_one(client, slots, prompt, flags)) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            outcome = await answer
            failed = failed or isinstance(outcome, QuireError)
            _print_outcome(prompt, outcome, flags.format)
    return 1 if failed else 0


async def _run_one(
    client: AsyncClient, slots: asyncio.Semaphore, prompt: str, flags: GenerateFlags
) -> Generation | QuireError:
    """The answer, or the error."""
    async with slots:
        try:
            return await client.generate(prompt, flags.options(), model=flags.model)
        except QuireError as error:
            return error


def _print_outcome(prompt: str, outcome: Generation | QuireError, output_format: str) -> None:
    if isinstance(outcome, QuireError):
        if output_format == "json":
            _print_json({"prompt": prompt, "error": {"code": outcome.code.name, "message": outcome.message}})
        else:
            print()
        print(f"{PROGRAM}: error: prompt {prompt!r:.60}: {outcome.message}", file=sys.stderr, flush=True)
        return
    if output_format == "text":
        print(outcome.text, flush=True)
        return
    sequence = outcome.sequences[0]
    _print_json(
        {
            "prompt": prompt,
            "text": sequence.text,
            "token_ids": list(sequence.token_ids),
            "finish_reason": str(sequence.finish_reason),
        }
    )


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)
