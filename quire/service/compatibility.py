"""Checks whether two processes are compatible: the versions of their contract, and their model.

Each side of a connection states both in its first message and checks the other's, so that one line on both sides names
the mismatch. A release that changes the meaning of a message raises `newest`; it keeps `oldest` while it still supports
the previous version, so that services can be upgraded one by one.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from quire.common.v1 import common_pb2
from quire.model_files.embedding_files import EmbeddingFiles, RankingFiles
from quire.model_files.gguf_header import GgufHeader
from quire.model_files.model_directory import ModelDirectory, weight_files
from quire.rpc.errors import FailedPrecondition
from quire.runtime.settings import ConfigurationError

_ATTEMPT_BITS = 20
_DIGEST_BYTES = 8
_NUM_SAMPLED_TENSORS = 64
_SAMPLE_BYTES = 1024
_MAX_HEADER_BYTES = 100 << 20
_WITHOUT_EFFECT = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Entries of config.json and tokenizer_config.json that say how the file came about."""
_OF_TEMPLATES = frozenset({"chat_template"})
_GGUF_TOKENIZER, _GGUF_TEMPLATES = "tokenizer.", "tokenizer.chat_template"
_GGUF_NOT_CONFIG = (_GGUF_TOKENIZER, "general.", "split.", "quantize.")
"""Beginnings of keys of the tokenizer, of the file's origin, and of defaults of requests."""


@dataclass(frozen=True, slots=True)
class ProtocolVersions:
    """The versions of a contract that a process speaks, `oldest` to `newest`; (0, 0) of a release before version 1."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        if not self.newest:
            return "no version"
        return f"version {self.newest}" if self.oldest == self.newest else f"versions {self.oldest} to {self.newest}"

    @classmethod
    def of(cls, message: common_pb2.ProtocolVersions) -> Self:
        return cls(message.oldest, message.newest)

    def message(self) -> common_pb2.ProtocolVersions:
        return common_pb2.ProtocolVersions(oldest=self.oldest, newest=self.newest)


SCHEDULER_PROTOCOL = ProtocolVersions(2, 2)
"""The versions of quire.scheduler.v1 that this release speaks, on both sides."""
WORKER_PROTOCOL = ProtocolVersions(2, 5)
"""The versions of quire.worker.v1 that this release speaks, on both sides."""
PREPARES_CONSTRAINTS = 3
"""The version of quire.worker.v1 from which workers take PrepareConstraint."""
HAS_LAYER_GROUPS = 4
"""The version of quire.worker.v1 from which schedulers know several groups of layers."""
HAS_STATES = 5
"""The version of quire.worker.v1 from which schedulers know layers that keep a state."""


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """The identity of a model: hashes of its parts, each empty if the process does not have it. See the message."""

    config: str = ""
    tokenizer: str = ""
    weights: str = ""

    @classmethod
    def of(cls, message: common_pb2.ModelFingerprint) -> Self:
        return cls(message.config, message.tokenizer, message.weights)

    @classmethod
    def read(cls, directory: ModelDirectory) -> Self:
        """The fingerprint of a directory or a GGUF file. It reads only the headers and a sample of the weights."""
        if directory.gguf is not None:
            return cls._of_gguf(directory.gguf)
        return cls(
            config=_digest([_canonical(directory.config, _WITHOUT_EFFECT)]),
            tokenizer=_tokenizer_digest(directory),
            weights=_weights_digest(_tensors_of(directory.path)),
        )

    @classmethod
    def _of_gguf(cls, header: GgufHeader) -> Self:
        """The fingerprint of the file's content, not of the configuration and the tokenizer that this release derives
        from it: a release that derives them better has the same model."""
        config = {
            key: value
            for key, value in header.metadata.items()
            if key == "general.architecture" or not key.startswith(_GGUF_NOT_CONFIG)
        }
        tokenizer = {
            key: value
            for key, value in header.metadata.items()
            if key.startswith(_GGUF_TOKENIZER) and not key.startswith(_GGUF_TEMPLATES)
        }
        tensors = (
            _StoredTensor(each.name, str(each.ggml_type), str(list(each.shape)), each.file, each.start, each.end)
            for each in header.tensors.values()
        )
        return cls(
            config=_digest([_canonical(config)]),
            tokenizer=_digest([_canonical(tokenizer)]),
            weights=_weights_digest(tensors),
        )

    def with_vectors(self, files: EmbeddingFiles | RankingFiles) -> Self:
        """The fingerprint of the same decoder if it gives vectors or scores."""
        kind = repr(files.modules[0]) if isinstance(files, EmbeddingFiles) else "scores"
        return replace(self, config=_digest([self.config.encode(), kind.encode()]))

    def message(self) -> common_pb2.ModelFingerprint:
        return common_pb2.ModelFingerprint(config=self.config, tokenizer=self.tokenizer, weights=self.weights)


UNKNOWN_MODEL = ModelFingerprint()
"""Fits every model."""


def check_protocol(contract: str, ours: ProtocolVersions, theirs: ProtocolVersions, *, us: str, them: str) -> None:
    """Raises FailedPrecondition (PROTOCOL_VERSION) where the two have no version of the contract in common.

    Args:
        us, them: the names of the two sides, in a line that either of them may print.
    """
    if theirs.newest and ours.oldest <= theirs.newest and theirs.oldest <= ours.newest:
        return
    older = them if theirs.newest < ours.oldest else us
    raise FailedPrecondition(
        f"{them} speaks {theirs} of {contract}, {us} {ours}: they have none in common; upgrade {older}",
        reason="PROTOCOL_VERSION",
    )


def unknown_field(message: Message) -> str | None:
    """A field that the sender has set and this release does not have, at any depth, as TYPE.NUMBER; None if there is no
    such field. For messages in which nothing may be ignored."""
    for unknown in UnknownFieldSet(message):
        return f"{message.DESCRIPTOR.full_name}.{unknown.field_number}"
    for name, is_repeated in _message_fields(message.DESCRIPTOR):
        is_set = len(getattr(message, name)) if is_repeated else message.HasField(name)
        if not is_set:
            continue
        value = getattr(message, name)
        for each in value if is_repeated else (value,):
            if (found := unknown_field(each)) is not None:
                return found
    return None


@cache
def _message_fields(descriptor: Descriptor) -> tuple[tuple[str, bool], ...]:
    """The fields of a type that hold messages, maps of numbers left out, and whether they are lists."""
    return tuple(
        (field.name, field.is_repeated)
        for field in descriptor.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    )


def differing_parts(ours: ModelFingerprint, theirs: ModelFingerprint) -> list[str]:
    """The parts that both have and that differ, each with our hash and theirs."""
    return [
        f"{field.name} {mine} and {other}"
        for field in fields(ModelFingerprint)
        if (mine := getattr(ours, field.name)) and (other := getattr(theirs, field.name)) and mine != other
    ]


def check_model(ours: ModelFingerprint, theirs: ModelFingerprint, *, us: str, them: str) -> None:
    """Raises FailedPrecondition (MODEL_MISMATCH) where a part that both have differs. `us`, `them`: as above."""
    if differing := differing_parts(ours, theirs):
        raise FailedPrecondition(
            f"{us} and {them} have different models: {', '.join(differing)}; give both the same one by --model, and "
            "the same --pooling",
            reason="MODEL_MISMATCH",
        )


def _tokenizer_digest(directory: ModelDirectory) -> str:
    try:
        tokenizer = directory.tokenizer_json()
    except ConfigurationError:
        return ""
    return _digest([tokenizer, _canonical(directory.tokenizer_config, _WITHOUT_EFFECT | _OF_TEMPLATES)])


def _weights_digest(stored: "Iterable[_StoredTensor]") -> str:
    """Independent of how the tensors are spread over files."""
    try:
        tensors = sorted(stored)
        step = max(len(tensors) // _NUM_SAMPLED_TENSORS, 1)
        samples = [_sample(tensor) for tensor in tensors[::step]]
    except (ConfigurationError, OSError, ValueError, KeyError, TypeError, RecursionError):
        # A file is missing or damaged, which the loader reports.
        return ""
    return _digest([*(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode() for tensor in tensors), *samples])


@dataclass(frozen=True, slots=True, order=True)
class _StoredTensor:
    """The position of a tensor's bytes in a file."""

    name: str
    dtype: str
    shape: str
    file: Path
    start: int
    end: int


def _tensors_of(path: Path) -> Iterator[_StoredTensor]:
    for file in weight_files(path):
        yield from _safetensors_of(file)


def _safetensors_of(file: Path) -> Iterator[_StoredTensor]:
    """From the header of a file: its length in 8 bytes, then JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length)) if length <= _MAX_HEADER_BYTES else None
    if not isinstance(header, dict):
        raise ValueError(f"{file} is not a safetensors file")
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            if end < start:
                raise ValueError(f"{file}: tensor {name} ends before it begins")
            yield _StoredTensor(name, str(entry["dtype"]), str(entry["shape"]), file, start, end)


def _sample(tensor: _StoredTensor) -> bytes:
    """Bytes from the middle of a tensor."""
    num_bytes = min(_SAMPLE_BYTES, tensor.end - tensor.start)
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start + (tensor.end - tensor.start - num_bytes) // 2)
        return opened.read(num_bytes)


def _canonical(content: dict[str, Any], without: frozenset[str] = frozenset()) -> bytes:
    kept = {name: value for name, value in content.items() if name not in without}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def epoch_of_start(started_at_s: float) -> int:
    """The epoch before the first attachment of a scheduler, which adds 1 for each attempt. So the start decides which
    of two schedulers is the newer one, however often either of them has tried.

    Args:
        started_at_s: in seconds since the Unix epoch.
    """
    return int(started_at_s * 1e3) << _ATTEMPT_BITS


def are_of_one_start(epoch: int, other: int) -> bool:
    """Whether two epochs are of the same scheduler, which may have attached its workers anew between them."""
    return epoch >> _ATTEMPT_BITS == other >> _ATTEMPT_BITS
