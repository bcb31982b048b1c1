"""A gateway in front of a fake scheduler with scripted output; its model's chats support tools and reasoning."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from quire.common.v1 import common_pb2
from quire.messages.arrays import decode_int32
from quire.model_files.model_source import resolve_model
from quire.scheduler.v1 import scheduler_pb2
from tests.support.chat_models import write_chat_model
from tests.support.fake_scheduler import FakeScheduler, counting_rule, scripted
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.parameters import row_sampling
from tests.support.tokenizers import id_of

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
EOS = id_of(TOKENIZER, "</s>")
TEXT = " there was a little dog."
SPEECH = TOKENIZER.encode(TEXT, add_special_tokens=False).ids

WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "Tells it.", "parameters": WEATHER_SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REASONED = f"<think>\nI need it.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"

REASONED_IDS = (*TOKENIZER.encode(REASONED, add_special_tokens=False).ids, EOS)


@dataclass(frozen=True)
class Rig:
    """One gateway for many tests, and its scheduler."""

    gateway: RunningGateway
    scheduler: FakeScheduler

    @property
    def http(self) -> httpx.AsyncClient:
        return self.gateway.http

    def says(self, text: str) -> None:
        """Sets the text of all sequences, after which they end by themselves."""
        self.scheduler.rule = scripted([*TOKENIZER.encode(text, add_special_tokens=False).ids, EOS])

    def reset(self) -> None:
        """Forgets requests and changes of earlier tests."""
        self.scheduler.step_delay_s, self.scheduler.tokens_per_step = 0.001, 1
        self.scheduler.emits.set()
        for each in (self.scheduler.submits, self.scheduler.aborted, self.scheduler.refusal):
            each.clear()
        self.says(TEXT)


@contextlib.asynccontextmanager
async def running_rig(directory: Path, **changes: Any) -> AsyncIterator[Rig]:
    settings: dict[str, Any] = {"model": str(write_chat_model(directory / "model")), "served_model_name": "quire-tiny"}
    settings |= changes
    async with (
        FakeScheduler() as scheduler,
        running_gateway(scheduler, max_stored_response_bytes=1 << 20, **settings) as gateway,
    ):
        yield Rig(gateway, scheduler)


def expected_ids(text: str, count: int) -> list[int]:
    """The output of a fake scheduler with its default rule."""
    prompt = tuple(TOKENIZER.encode(text).ids)
    return [counting_rule(prompt, position) for position in range(count)]


def prompt_of(submit: scheduler_pb2.Submit) -> list[int]:
    return decode_int32(submit.prompt_token_ids, "prompt").tolist()


def prompt_text_of(submit: scheduler_pb2.Submit) -> str:
    return TOKENIZER.decode(prompt_of(submit), skip_special_tokens=False)


def constraint_of(submit: scheduler_pb2.Submit) -> common_pb2.Constraint | None:
    sampling = row_sampling(submit).sampling
    return sampling.constraint if sampling.HasField("constraint") else None
