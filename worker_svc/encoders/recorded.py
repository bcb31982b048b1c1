"""Runs the layers of an encoder as one call of the CPU library."""

import logging

import numpy as np
import torch

from quire_kernels.recording import NotRecordableError, Recording, record
from worker_svc.encoders.encoder import Encoder, PackedTexts

_logger = logging.getLogger(__name__)


class RecordedEncoder:
    """An encoder whose layers run from a recording, if they are operations of the library.

    A step of one short text has some forty operations. Python between them, and threads that fall asleep and wake at
    each, take longer than the operations.

    Attributes:
        is_recorded: whether they are.
    """

    _output: torch.Tensor

    def __init__(self, encoder: Encoder, max_tokens_at_once: int) -> None:
        """Texts of more than `max_tokens_at_once` tokens run without the recording."""
        self._encoder, self._max_tokens = encoder, max_tokens_at_once
        with torch.inference_mode():
            token_ids = torch.zeros(max_tokens_at_once, dtype=torch.int64)
            self._lengths = np.zeros(max_tokens_at_once, np.int32)
            room = PackedTexts(token_ids, token_ids.clone(), self._lengths)
            one = encoder.embed(PackedTexts.of([token_ids[:1]]))
            self._embedded, self._positions = one.new_empty(max_tokens_at_once, one.shape[1]), room.positions
            self._recording = self._record(room)
        self.is_recorded = self._recording is not None

    def __call__(self, texts: PackedTexts) -> torch.Tensor:
        """Returns [T, hidden], which the next call may overwrite."""
        num_tokens = len(texts.token_ids)
        if self._recording is None or num_tokens > self._max_tokens:
            return self._encoder(texts)
        self._embedded[:num_tokens] = self._encoder.embed(texts)
        self._positions[:num_tokens] = texts.positions
        self._lengths[: len(texts.lengths)] = texts.lengths
        self._recording.run(num_tokens, len(texts.lengths))
        return self._output[:num_tokens]

    def _record(self, room: PackedTexts) -> Recording | None:
        def run() -> None:
            self._output = self._encoder.run_layers(self._embedded, room)

        try:
            return record(self._max_tokens, run)
        except NotRecordableError as error:
            _logger.info("layers run one operation at a time: %s", error)
            return None
