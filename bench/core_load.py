"""Running sequences for the measurements of the core: a batch that only decodes, and one that turns over."""

from collections.abc import Iterator

from bench.rule_source import make_request
from quire.load import sharegpt, take
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler

_BLOCK_SIZE, _STEADY_PROMPT, _LONGEST = 16, 20, 1024
_MEAN_TOKENS = 161 + 338
"""Mean prompt and output tokens of a chat."""
_QUEUE = 16
"""Number of waiting requests while the batch turns over."""


class Load:
    """A scheduler, and the requests that keep it busy."""

    def __init__(self, scheduler: Scheduler, requests: Iterator[Request]) -> None:
        self.scheduler = scheduler
        self._requests = requests

    def refill(self) -> None:
        """Submits requests until enough wait, or none is left."""
        while len(self.scheduler.waiting) < _QUEUE:
            request = next(self._requests, None)
            if request is None:
                return
            self.scheduler.submit(request, 0.0)


def steady_load(num_sequences: int, num_steps: int, *, logprobs: int | None = None) -> Load:
    """All sequences decode for `num_steps` steps, each with `logprobs` log probabilities; none comes, goes or waits."""
    blocks_each = -(-(_STEADY_PROMPT + num_steps) // _BLOCK_SIZE) + 1
    config = SchedulerConfig(
        num_blocks=num_sequences * blocks_each,
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=num_sequences * _STEADY_PROMPT,
        max_model_len=_STEADY_PROMPT + num_steps,
        max_waiting_requests=num_sequences,
        watermark=0.0,
    )
    scheduler = Scheduler(config)
    for index in range(num_sequences):
        # Lengths differ, so that blocks fill up at different steps, as they do in real batches.
        prompt = [1] * (1 + index % _STEADY_PROMPT)
        scheduler.submit(make_request(index, prompt, num_steps, logprobs=logprobs), 0.0)
    return Load(scheduler, iter(()))


def turning_load(num_sequences: int, num_requests: int) -> Load:
    """Chats come and go; at least one waits for a row, and the blocks are enough for most of them."""
    load = take(sharegpt(_LONGEST, vocab_size=1000), num_requests, seed=0)
    config = SchedulerConfig(
        num_blocks=num_sequences * _MEAN_TOKENS // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(2048, 2 * num_sequences),
        max_model_len=_LONGEST,
    )
    requests = (make_request(each.index, [each.index] * len(each.token_ids), each.output_len or 0) for each in load)
    return Load(Scheduler(config), requests)
