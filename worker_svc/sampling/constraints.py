"""Constraints of rows: a matcher for each constrained row, and the masks of the allowed next tokens.

The state of a matcher is a function of its row's output. It is made from the tokens that the row is assigned with,
advances by the tokens that the row samples, is copied when the row forks, and is made again when tokens are replaced.
So a replayed, preempted or resumed row gets the same masks as an undisturbed one.

A thread computes the masks while the model runs: `start_masks` starts it before the forward pass, and the returned
`Masks` are used after it. Rows without a constraint have no cost.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor

from quire.common.v1.common_pb2 import Constraint, RowSampling
from quire.constraints.json_schema import ConstraintError
from quire.constraints.matcher import MaskMaker, Matcher, Template, Vocabulary
from quire.constraints.thinking import ThinkingState
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import Int32Array, RowChanges, RowConstraint
from worker_svc.streams import to_device

# Size of the constraints, as messages, whose compiled form is cached. A compiled one takes up to 100 times as much.
_CACHE_BYTES = 4 << 20
_CACHE_ENTRY_BYTES = 4096
# The scheduler counts on the 64 that were prepared last, and rows may have used as many older ones meanwhile.
MIN_KEPT = 128
# Steps have priority over the compilation for later steps' rows.
_COMPILER_NICENESS = 10
# The terms of eight tokens, by an octet of a mask.
_TERMS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(
    np.float32
)
# Up to this number of changed octets, it is faster to write only these.
_FEW_OCTETS = 2048

DrawnTokens = Callable[[], NDArray[np.integer]]
"""Waits for the sampled tokens of a step: [s], in the order of its samples."""


@dataclass(frozen=True, slots=True)
class Masks:
    """The allowed tokens of the constrained samples of a step.

    Attributes:
        places: [m], the indices of the constrained samples among all samples.
        bits: [m, words], one bit per token.
        errors: By place, the reason why no token is allowed; the bits of these samples are zero.
        terms: [m, vocab], precomputed terms that are added to the logits on the CPU; None on other devices.
    """

    places: NDArray[np.int64]
    bits: NDArray[np.int32]
    errors: dict[int, str]
    terms: NDArray[np.float32] | None = None

    def refuse(self, columns: SamplingColumns) -> None:
        """Fails the samples without an allowed token."""
        for place, error in self.errors.items():
            columns.refuse(np.array([place]), error)

    def exclude_tokens(self, logits: Tensor) -> None:
        """Sets the logits of excluded tokens to -infinity. `logits` is [s, vocab]."""
        width = logits.shape[1]
        if not len(self.places):
            return
        if logits.is_cpu:
            terms = Terms(width).from_masks(self.bits) if self.terms is None else self.terms
            if len(terms) == len(logits):
                logits.add_(torch.from_numpy(terms))
            else:
                rows = logits.numpy()
                for place, added in zip(self.places.tolist(), terms, strict=True):
                    rows[place] += added
            return
        exclude(logits, to_device(self.places, logits.device), to_device(self.bits, logits.device))


def exclude(logits: Tensor, places: Tensor, bits: Tensor) -> None:
    """Sets logits of excluded tokens to -infinity, on any device: logits [s, vocab], places [m], bits [m, words]."""
    width = logits.shape[1]
    shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
    excluded = ((bits[:, :, None] >> shifts) & 1).view(len(bits), -1)[:, :width] == 0
    masked = logits[places]
    masked[:, : excluded.shape[1]].masked_fill_(excluded, -torch.inf)
    masked[:, excluded.shape[1] :] = -torch.inf
    logits.index_copy_(0, places, masked)


class Terms:
    """Masks as terms to add to the logits: 0 for an allowed token, -infinity for the others.

    On the CPU one addition for all rows is the fastest way to apply masks. Measured on two cores for 64 rows of 128,000
    tokens: 1.6 ms, against 3 to 16 ms for filling the excluded tokens. The terms are computed during the forward pass,
    and are reused in the next step if the mask of a row stays the same, as it mostly does within a string.
    """

    def __init__(self, width: int) -> None:
        """`width` is the width of the logits."""
        self._width = width
        # Whole octets.
        self._terms = np.zeros((0, -(-width // 8), 8), np.float32)
        self._octets = np.zeros((0, 0), np.uint8)

    def from_masks(self, bits: NDArray[np.int32]) -> NDArray[np.float32]:
        """[m, width], of masks [m, words]; valid until the next call."""
        octets = bits.view(np.uint8)[:, : self._terms.shape[1]]
        if len(octets) > len(self._terms) or octets.shape[1] != self._octets.shape[1]:
            self._octets = np.zeros((len(octets), octets.shape[1]), np.uint8)
            self._terms = np.full((len(octets), *self._terms.shape[1:]), -np.inf, np.float32)
        for new, old, terms in zip(octets, self._octets, self._terms, strict=False):
            changed = np.flatnonzero(new != old)
            if len(changed) > _FEW_OCTETS:
                np.take(_TERMS, new, axis=0, out=terms[: len(new)], mode="clip")
            else:
                terms[changed] = _TERMS[new[changed]]
            old[changed] = new[changed]
        return self._terms[: len(bits)].reshape(len(bits), -1)[:, : self._width]


@dataclass(slots=True)
class _Row:
    constraint: RowConstraint
    template: "Future[Template] | None"
    """None if only the reasoning is limited."""
    vocabulary: "Future[Vocabulary]"
    draws: bool
    prompt: Int32Array
    output: list[int]
    matcher: Matcher | None = None
    thinking: ThinkingState | None = None
    error: str | None = None
    """The reason why there is no matcher or no state of the reasoning that there should be."""

    def ready(self) -> Matcher | None:
        """The matcher after the output, None if there is none; the state of the reasoning is up to date then, too.
        Waits until the constraint is compiled."""
        if self.error is None and self.matcher is None and self.template is not None:
            try:
                self.matcher = self.template.result().matcher(self.constraint.ending_token_ids)
            except ConstraintError as error:
                name = "" if error.field else "it"
                self.error = f"sampling.constraint: {error.field}{name} {error.description}"
            else:
                self._follow(self.matcher, self.output)
        if self.error is None and self.thinking is None and (limit := self.constraint.thinking) is not None:
            try:
                token_bytes = self.vocabulary.result().token_bytes
            except Exception as error:
                self.error = f"sampling.thinking_token_budget cannot be enforced with this model's tokenizer: {error}"
            else:
                self.thinking = ThinkingState(limit, token_bytes, self.prompt.tolist())
                self._follow(self.thinking, self.output)
        return self.matcher

    @staticmethod
    def _follow(state: Matcher | ThinkingState | None, token_ids: Sequence[int]) -> None:
        if state is not None:
            for token_id in token_ids:
                state.consume(token_id)

    def append(self, token_ids: Sequence[int]) -> None:
        self.output.extend(token_ids)
        self._follow(self.matcher, token_ids)
        self._follow(self.thinking, token_ids)

    def replace(self, position: int, token_ids: Sequence[int]) -> None:
        """Replaces the tokens of the sequence from a position on."""
        position -= len(self.prompt)
        if position < len(self.output):
            del self.output[position:]
            self.matcher = self.thinking = None
        self.append(token_ids)

    def copy(self) -> "_Row":
        return replace(
            self,
            output=list(self.output),
            matcher=None if self.matcher is None else self.matcher.copy(),
            thinking=None if self.thinking is None else self.thinking.copy(),
        )

    def forced(self) -> list[int]:
        """Returns the next tokens, up to the first that is uncertain."""
        matcher = self.ready()
        if self.thinking is not None and (end := self.thinking.forced):
            return list(end)
        return [] if matcher is None else matcher.forced()

    @property
    def delays_end(self) -> bool:
        return len(self.output) < self.constraint.min_tokens


class TemplateCache:
    """Compiled constraints by their content, the least recently used ones dropped. Compiles in a thread of its own.

    Safe to use from several threads. Tenants share it: a request whose constraint was dropped waits for it before its
    row is planned, and no other request waits.
    """

    def __init__(self, open_vocabulary: Callable[[], Vocabulary]) -> None:
        """The vocabulary is opened at once, in a thread of its own. This has no low priority: it keeps all others from
        the interpreter for as long as it takes."""
        opener = ThreadPoolExecutor(1, "vocabulary")
        self.vocabulary = opener.submit(open_vocabulary)
        opener.shutdown(wait=False)
        self._compiler = ThreadPoolExecutor(1, "constraints-compile", initializer=_be_nice)
        self._lock = threading.Lock()
        self._templates: OrderedDict[bytes, Future[Template]] = OrderedDict()
        self._num_bytes = 0

    def prepare(self, row_sampling: bytes) -> "Future[Template] | None":
        """Compiles the constraint of a serialized RowSampling, if it has one that can be read."""
        try:
            sampling = RowSampling.FromString(row_sampling).sampling
        except DecodeError:
            return None
        return self.get(sampling.constraint) if sampling.HasField("constraint") else None

    def get(self, constraint: Constraint) -> "Future[Template]":
        """A future of the compiled constraint, or of a ConstraintError if it cannot be enforced."""
        key = constraint.SerializeToString(deterministic=True)
        with self._lock:
            if (template := self._templates.get(key)) is None or _has_failed(template):
                if template is None:
                    self._num_bytes += len(key) + _CACHE_ENTRY_BYTES
                template = self._templates[key] = self._compiler.submit(self._compile, constraint)
            self._templates.move_to_end(key)
            while self._num_bytes > _CACHE_BYTES and len(self._templates) > MIN_KEPT:
                dropped, _ = self._templates.popitem(last=False)
                self._num_bytes -= len(dropped) + _CACHE_ENTRY_BYTES
        return template

    def wait_for_vocabulary(self) -> None:
        """Waits until the tables of the vocabulary are made, or have failed, which only constrained rows report."""
        wait([self.vocabulary])

    def drop(self, constraint: Constraint) -> None:
        """Drops a constraint whose matcher failed. Its matchers share state, so the next use compiles it again."""
        key = constraint.SerializeToString(deterministic=True)
        with self._lock:
            if self._templates.pop(key, None) is not None:
                self._num_bytes -= len(key) + _CACHE_ENTRY_BYTES

    def close(self) -> None:
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: Constraint) -> Template:
        try:
            vocabulary = self.vocabulary.result()
        except Exception as error:
            raise ConstraintError("", f"cannot be enforced with this model's tokenizer: {error}") from error
        return Template.of(constraint, vocabulary)


def _allows(mask: NDArray[np.int32], token_id: int) -> bool:
    word, bit = divmod(token_id, 32)
    return word < len(mask) and bool(mask[word] >> bit & 1)


def _be_nice() -> None:
    """Lowers the priority of the calling thread only, which needs Linux."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _COMPILER_NICENESS)


def _has_failed(template: "Future[Template]") -> bool:
    return template.done() and template.exception() is not None


class RowMatchers:
    """The matchers of all constrained rows. The thread that launches steps calls it, in the order of the steps."""

    def __init__(self, templates: TemplateCache, *, num_threads: int, host_width: int | None = None) -> None:
        """Call it before the launching thread is bound to a processor, because the thread made here inherits that.

        Args:
            num_threads: Number of threads that compute the masks of a step.
            host_width: Width of the logits if they are on the CPU, else None.
        """
        self._templates = templates
        self._num_threads = num_threads
        # The fields below belong to the thread, except `_has_rows`: whether the last launched step left any constrained
        # rows, which the thread will process.
        self._thread = ThreadPoolExecutor(1, "constraints")
        self._thread.submit(int).result()
        self._terms = None if host_width is None else Terms(host_width)
        self._maker: MaskMaker | None = None
        self._rows: dict[int, _Row] = {}
        self._error: Exception | None = None
        self._has_rows = False

    def start_masks(
        self,
        changes: RowChanges,
        samplers: Int32Array,
        has_constraint: NDArray[np.bool_],
        inputs: Int32Array | None = None,
    ) -> "Future[Masks] | None":
        """Applies the changes of a step and starts to compute the masks of the rows that sample in it.

        Args:
            samplers: [s]. A row that has drafts is there several times, one after the other.
            has_constraint: [rows], after the changes.
            inputs: [s], the token after which each draws: a draft, where the row was there just before. Without it, all
                rows are distinct.

        Returns:
            A future of the masks; None if no row that samples has a constraint.
        """
        if not changes.are_none:
            had_rows, self._has_rows = self._has_rows, bool(has_constraint.any())
            if had_rows or self._has_rows:
                self._thread.submit(self._follow_or_fail, self._apply, changes)
        places = np.flatnonzero(has_constraint[samplers]).tolist()
        if not places:
            return None
        return self._thread.submit(self._make, places, samplers, inputs)

    def forced(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Returns the next tokens of these constrained rows while the text is certain. Waits for the rows' last tokens.
        The rows must not have changed since the last `begin`."""
        return self._thread.submit(self._forced, rows).result()

    def _forced(self, rows: Sequence[int]) -> dict[int, list[int]]:
        held = {row: each for row in rows if (each := self._rows.get(row)) is not None and each.draws}
        return {row: forced for row, each in held.items() if (forced := each.forced())}

    def record_draws(self, samplers: Int32Array, token_ids: DrawnTokens) -> None:
        """Passes the sampled tokens of the step of the last `begin`. Call it only if that returned masks."""
        self._thread.submit(self._follow_or_fail, self._append, samplers, token_ids)

    def close(self) -> None:
        """Ends the threads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._templates.close()

    def _follow_or_fail(self, change: Callable[..., None], *arguments: object) -> None:
        """After an error, matchers may lag behind their rows: the next step fails, and all rows are assigned again."""
        try:
            change(*arguments)
        except Exception as error:
            self._error = error

    def _apply(self, changes: RowChanges) -> None:
        rows = self._rows
        for row in changes.release.tolist():
            rows.pop(row, None)
        for each in changes.assign:
            if (constraint := each.sampling.constraint) is None:
                rows.pop(each.row, None)
            else:
                prompt, output = np.split(each.token_ids, [each.num_prompt_tokens])
                draws, message = each.sampling.num_candidates is None, constraint.message
                template = None if message is None else self._templates.get(message)
                vocabulary = self._templates.vocabulary
                rows[each.row] = _Row(constraint, template, vocabulary, draws, prompt, output.tolist())
        pairs = changes.fork.tolist()
        parents = {parent: rows.get(parent) for parent, _ in pairs}
        for parent, child in pairs:
            if (held := parents[parent]) is None:
                rows.pop(child, None)
            else:
                rows[child] = held.copy()
        for each in changes.set_tokens:
            if (held := rows.get(each.row)) is not None:
                held.replace(each.position, each.token_ids.tolist())

    def _make(self, places: list[int], samplers: Int32Array, inputs: Int32Array | None) -> Masks:
        if (error := self._error) is not None:
            self._error = None
            raise error
        made: dict[int, tuple[_Row, NDArray[np.int32]]] = {}
        errors: dict[int, str] = {}
        due = [place for place in places if not place or samplers[place - 1] != samplers[place]]
        rows, firsts = [self._rows[int(samplers[place])] for place in due], frozenset(due)
        while due:
            made.update(zip(due, zip(rows, self._masks_of(due, rows, errors), strict=True), strict=True))
            # Goes on with the drafts that may be drawn: a token after an impossible one is never kept.
            due = [place + 1 for place in due if place + 1 < len(samplers) and samplers[place + 1] == samplers[place]]
            due = [place for place in due if inputs is not None and _allows(made[place - 1][1], int(inputs[place]))]
            # One copy of each goes on: it takes longer than a mask.
            rows = [row.copy() if place - 1 in firsts else row for place in due for row in (made[place - 1][0],)]
            for row, place in zip(rows, due, strict=True):
                assert inputs is not None
                row.append([int(inputs[place])])
        width = max((len(mask) for _, mask in made.values()), default=0)
        # A row whose reasoning is limited is mostly free.
        places = [place for place in places if place not in made or place in errors or (made[place][1] != -1).any()]
        bits = np.zeros((len(places), width), np.int32)
        for index, place in enumerate(places):
            if place in made and len(mask := made[place][1]):
                bits[index] = mask
        terms = None if self._terms is None or not places else self._terms.from_masks(bits)
        return Masks(np.array(places, np.int64), bits, errors, terms)

    def _masks_of(self, places: list[int], rows: list[_Row], errors: dict[int, str]) -> NDArray[np.int32]:
        """[n, words], or [n, 0] if no row can go on. Adds why no token is allowed to `errors`."""
        matchers = [row.ready() for row in rows]
        errors |= {place: row.error for place, row in zip(places, rows, strict=True) if row.error is not None}
        if all(row.error is not None for row in rows):
            return np.zeros((len(places), 0), np.int32)
        usable = [index for index, matcher in enumerate(matchers) if matcher is not None]
        vocabulary = self._templates.vocabulary.result()
        if self._maker is None:
            self._maker = MaskMaker(vocabulary, self._num_threads)
        bits = np.zeros((len(places), vocabulary.num_words), np.int32)
        made = [matcher for matcher in matchers if matcher is not None]
        bits[usable] = self._maker.make(made, [rows[index].delays_end for index in usable])
        for index, matcher in zip(usable, made, strict=True):
            if matcher.error is not None and (message := rows[index].constraint.message) is not None:
                errors[places[index]] = f"sampling.constraint: {matcher.error}"
                self._templates.drop(message)
        for mask, row in zip(bits, rows, strict=True):
            if row.template is None and row.error is None:
                mask[:] = -1
            forced = () if row.thinking is None else row.thinking.forced
            # Where a constraint of all text does not allow the end of the reasoning, the constraint goes before.
            if forced and (both := mask & vocabulary.mask_of_set(frozenset(forced[:1]))).any():
                mask[:] = both
        return bits

    def _append(self, samplers: Int32Array, token_ids: DrawnTokens) -> None:
        drawn = token_ids().tolist()
        for row, token_id in zip(samplers.tolist(), drawn, strict=True):
            if (held := self._rows.get(row)) is not None and held.draws:
                held.append([token_id])
