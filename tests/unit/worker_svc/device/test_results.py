"""Results on their way to the host. On which streams: test_runner.py."""

import torch
from torch import Tensor

from worker_svc.device.runner import HostCopy, StepValues
from worker_svc.sampling.logprobs import CandidateValues, LogprobValues
from worker_svc.streams import IN_ORDER


def test_every_value_arrives_in_its_own_slot() -> None:
    numbers = [torch.tensor([number]) for number in range(13)]
    logprobs, prompts = LogprobValues(*numbers[3:7]), LogprobValues(*numbers[7:11])
    token_ids, is_finite, finite_tokens = numbers[:3]
    sent = StepValues(token_ids, is_finite, finite_tokens, logprobs, CandidateValues(*numbers[11:]), prompts)
    assert HostCopy(sent, IN_ORDER, IN_ORDER).wait() == sent.map(Tensor.numpy)
