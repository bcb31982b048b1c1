"""The LoRA adapters that a worker holds in its memory, by slot (ADR 0054).

The scheduler decides which adapter is in which slot. A load reads the files and packs the tensors during the steps; the
tensors are then put into the slot between two steps.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from quire.model_files.adapter_files import (
    PICKLED,
    AdaptedModule,
    Adapter,
    UnusableAdapterError,
    check_digest,
    check_distinct,
    read_adapter,
)
from quire.model_files.model_directory import name_within
from quire.runtime import clock
from quire_kernels.cpu.library import LibraryUnavailableError, find_open_mp
from quire_kernels.low_rank import LowRank
from worker_svc.layers.experts import Experts
from worker_svc.layers.latent_attention import LatentProjections
from worker_svc.layers.linear import Linear
from worker_svc.models.base import CausalLM, NativeCausalLM

_logger = logging.getLogger(__name__)

_MAX_READERS = 16
"""Maximum simultaneous loads. Schedulers have two underway; more are loads that do not end, as from a network file
system that is gone, or loads of earlier sessions."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in memory, ready to be put into a slot: its part for each linear layer of the model."""

    adapter: Adapter
    packed: tuple[tuple[Linear, Any], ...]

    @property
    def num_bytes(self) -> int:
        return sum(linear.adapters.num_bytes(packed) for linear, packed in self.packed)


class AdapterSlots:
    """The slots of one model, and the adapters in them. `start_load` may be called in any thread; the rest belongs to
    the thread that runs the steps.

    Args:
        max_adapters: the number of slots.
        max_rank: of any adapter.
    """

    def __init__(self, model: CausalLM, max_adapters: int, max_rank: int) -> None:
        self._max_rank = max_rank
        self._architecture, self._dtype = model.architecture, model.dtype
        self._base_prefix = model.base_prefix if isinstance(model, NativeCausalLM) else ""
        self._linears = adapted_linears(model)
        for linear in self._linears:
            linear.accept_adapters(model.token_slots, max_adapters, max_rank)
        parts = (part for linear in self._linears for part in linear.adapted_modules)
        self._shapes = {name: shape[:2] for part in parts for name, shape in part.items()}
        self._projections = {each.name for each in model.modules() if isinstance(each, LatentProjections)}
        # The adapter of each slot; torch's tables hold a copy of it.
        self._adapted: list[tuple[Linear, ...]] = [()] * max_adapters
        self._num_bytes = [0] * max_adapters
        self._readers: list[threading.Thread] = []

    @property
    def num_bytes(self) -> int:
        """Memory that the adapters in all slots take."""
        return sum(self._num_bytes)

    def start_load(self, directory: Path, digest: bytes) -> "Future[LoadedAdapter]":
        """`load` in a thread of its own, which holds up neither other loads nor the end of the process."""
        future, load = Future[LoadedAdapter](), partial(self.load, directory, digest)

        def read() -> None:
            _use_one_thread()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(load())
                except BaseException as error:
                    future.set_exception(error)

        self._readers = [thread for thread in self._readers if thread.is_alive()]
        if len(self._readers) >= _MAX_READERS:
            problem = f"adapter {directory}: {len(self._readers)} loads before it do not end; restart this worker"
            future.set_exception(UnusableAdapterError(problem))
            return future
        self._readers.append(threading.Thread(target=read, name="adapter", daemon=True))
        self._readers[-1].start()
        return future

    def load(self, directory: Path, digest: bytes) -> LoadedAdapter:
        """Reads an adapter for this model.

        Raises:
            UnusableAdapterError: its files are damaged, of another digest, or of another model.
        """
        started = clock.monotonic()
        adapter = read_adapter(directory)
        check_digest(adapter, digest)
        if adapter.rank > self._max_rank:
            raise UnusableAdapterError(
                f"adapter {directory} has rank {adapter.rank}; this worker takes at most {self._max_rank}, "
                "see --max-adapter-rank"
            )
        names = {name: self._name_of(name, module, adapter) for name, module in adapter.modules.items()}
        check_distinct(directory, names)
        modules = {of_model: name for name, of_model in names.items()}
        try:
            with _opened(adapter.files) as read, torch.inference_mode():
                packed = tuple(self._pack(linear, modules, adapter, read) for linear in self._linears)
        except (SafetensorError, OSError) as error:
            raise UnusableAdapterError(f"{directory}: damaged or truncated safetensors file: {error}") from error
        loaded = LoadedAdapter(adapter, tuple(each for each in packed if each is not None))
        _logger.info(
            "adapter %s of rank %d is loaded: %.1f MiB in %.2f s",
            directory,
            adapter.rank,
            loaded.num_bytes / 2**20,
            clock.monotonic() - started,
        )
        return loaded

    @torch.inference_mode()
    def put(self, slot: int, loaded: LoadedAdapter | None) -> None:
        """Replaces the adapter of a slot, which no row of a later step uses; None empties it."""
        for linear in self._adapted[slot]:
            linear.adapters.put(slot + 1, None)
        parts = () if loaded is None else loaded.packed
        # Before they are filled: if that fails, all of them are emptied next.
        self._adapted[slot] = tuple(linear for linear, _ in parts)
        for linear, packed in parts:
            linear.adapters.put(slot + 1, packed)
        self._num_bytes[slot] = 0 if loaded is None else loaded.num_bytes

    def clear(self) -> None:
        """Empties all slots."""
        for slot in range(len(self._adapted)):
            self.put(slot, None)

    def _name_of(self, name: str, module: AdaptedModule, adapter: Adapter) -> str:
        """The name of a module in the model. It lacks the prefix in an adapter of the base model only, and has a
        further part in an adapter of a model with image inputs, which contains this language model."""
        name = name_within(name)
        prefixed = f"{self._base_prefix}{name}"
        name = prefixed if prefixed in self._shapes else name
        shape = self._shapes.get(name)
        if shape is None:
            why = "the adapter is of another one"
            if ".experts." in name:
                why = "routed experts take none"
            elif self._projections & {name, prefixed}:
                why = "latent attention never computes its outputs"
            raise UnusableAdapterError(
                f"adapter {adapter.directory} adapts {name}, which is no linear layer of this model "
                f"({self._architecture}) that takes adapters: {why}"
            )
        if shape != (module.num_inputs, module.num_outputs):
            raise UnusableAdapterError(
                f"adapter {adapter.directory}: {name} has {module.num_inputs} inputs and {module.num_outputs} outputs; "
                f"this model has {shape[0]} and {shape[1]}: the adapter is of another one"
            )
        return name

    def _pack(
        self, linear: Linear, modules: Mapping[str, str], adapter: Adapter, read: Callable[[str], torch.Tensor]
    ) -> tuple[Linear, Any] | None:
        def tensor(name: str, side: str) -> torch.Tensor:
            found = read(f"base_model.model.{name}.lora_{side}.weight").float()
            # In the dtype of products: where these are of all slots, one that is not finite is NaN in other rows, too.
            if not found.to(self._dtype).isfinite().all():
                dtype = str(self._dtype).removeprefix("torch.")
                raise UnusableAdapterError(
                    f"adapter {adapter.directory}: lora_{side} of {name} has numbers not finite in {dtype}, the dtype "
                    "of the model"
                )
            return found

        def part(layers: Mapping[str, tuple[int, int, int]]) -> LowRank | None:
            found = [(modules[layer], first) for layer, (_, _, first) in layers.items() if layer in modules]
            if not found:
                return None
            if len(found) > 1:
                (whole, _), (apart, _) = found
                raise UnusableAdapterError(
                    f"adapter {adapter.directory}: {apart} is a part of {whole}, and both are there; keep one of them"
                )
            ((name, first),) = found
            # B of a layer that is a part of the checkpoint's begins where its outputs are there.
            b = functional.pad(tensor(name, "B"), (0, 0, first, 0))
            return LowRank(tensor(name, "A"), b, adapter.modules[name].scale)

        parts = [part(layers) for layers in linear.adapted_modules]
        if all(each is None for each in parts):
            return None
        return linear, linear.adapters.pack(linear.of_rank(parts))


@contextmanager
def _opened(files: Sequence[Path]) -> Iterator[Callable[[str], torch.Tensor]]:
    """Reads a tensor of one of the files by its name."""
    if files[0].suffix == PICKLED:
        yield torch.load(files[0], map_location="cpu", weights_only=True).__getitem__
        return
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        places = {name: each for each in opened for name in each.keys()}  # noqa: SIM118 - not a mapping
        yield lambda name: places[name].get_tensor(name)


def adapted_linears(model: CausalLM) -> tuple[Linear, ...]:
    """The linear layers between embedding and head, except in routed experts, which compute only some tokens."""
    assert isinstance(model, NativeCausalLM)
    modules = list(model.layers.modules())
    of_experts = {id(each) for layer in modules if isinstance(layer, Experts) for each in layer.experts.modules()}
    return tuple(module for module in modules if isinstance(module, Linear) and id(module) not in of_experts)


def _use_one_thread() -> None:
    """Restricts the calling thread to one thread per operation; more would take processors from the steps' threads."""
    torch.get_num_threads()  # Otherwise torch would set it anew at the first operation.
    with suppress(LibraryUnavailableError, OSError, AttributeError):
        ctypes.CDLL(str(find_open_mp())).omp_set_num_threads(1)
