"""Requests of the gateway's generator, as callers send them and as they are submitted."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gateway.replicas.generation_request import GenerationRequest
from gateway.types import Prompt, RequestOptions, TextPrompt, write
from quire.common.v1.common_pb2 import OutputOptions, RowSampling, SamplingParameters, StoppingParameters
from quire.scheduler.v1 import scheduler_pb2


def make_options(
    prompt: Prompt | None = None,
    *,
    sampling: Mapping[str, Any] | None = None,
    stopping: Mapping[str, Any] | None = None,
    output: Mapping[str, Any] | None = None,
    **fields: Any,
) -> RequestOptions:
    """A request with these parameters, valid or not; `beam_search` is a mapping too."""
    as_written: dict[str, Any] = {}
    options = RequestOptions(prompt or TextPrompt("hello"), as_written=as_written, **fields)
    for path, values in (("sampling", sampling), ("stopping", stopping), ("output", output)):
        _write_all(getattr(options, path), path, values or {}, as_written)
    return options


def _write_all(message: Any, path: str, values: Mapping[str, Any], as_written: dict[str, Any]) -> None:
    for name, value in values.items():
        if name == "beam_search":
            message.beam_search.SetInParent()
            _write_all(message.beam_search, f"{path}.{name}", value, as_written)
        else:
            write(message, f"{path}.{name}", value, as_written)


def row_sampling(submit: scheduler_pb2.Submit) -> RowSampling:
    """The parameters by which the worker samples."""
    return RowSampling.FromString(submit.row_sampling)


def make_request(
    request_id: str = "story",
    tenant: str = "",
    *,
    prompt: Sequence[int] = (5, 6, 7),
    max_tokens: int = 100,
    stop: Sequence[str] = (),
    num_sequences: int = 1,
    logprobs: int | None = None,
    eos_token_ids: Sequence[int] = (1,),
    **fields: Any,
) -> GenerationRequest:
    """A greedy request that has been validated."""
    return GenerationRequest(
        request_id=request_id,
        tenant=tenant,
        prompt_token_ids=np.array(prompt, np.int32),
        sampling=SamplingParameters(n=num_sequences, best_of=num_sequences),
        stopping=StoppingParameters(max_tokens=max_tokens, stop=stop),
        output=OutputOptions(logprobs=logprobs),
        seed=1,
        eos_token_ids=eos_token_ids,
        **fields,
    )
