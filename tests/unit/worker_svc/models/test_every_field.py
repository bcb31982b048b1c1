"""Each field of each family's configuration with other values: the logits equal transformers', or it is refused."""

import copy
import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from quire.runtime.settings import ConfigurationError
from tests.support.models import COMMON, FAMILIES, FOREIGN, Family, randomize
from tests.support.paged import PagedRunner, Span
from tests.support.parity import expected_logits, make_sequences
from worker_svc.models.registry import load_model

pytestmark = pytest.mark.long

LENGTH, CUTS, TOLERANCE = 45, (0, 20, 44, 45), 2e-3
ACTIVATIONS = ("gelu", "relu", "gelu_pytorch_tanh", "relu2", "silu", "gelu_new", "quick_gelu", "swish", "mish", "tanh")
KINDS = {"layer_types": {"full_attention", "sliding_attention"}, "mlp_layer_types": {"dense", "sparse"}}
UNSET: Mapping[str, tuple[Any, ...]] = {
    "sliding_window": (7,),
    "head_dim": (20, 48),
    "num_key_value_heads": (1, 4),
    "q_lora_rank": (24,),
    "attn_logit_softcapping": (2.0,),
    "final_logit_softcapping": (1.5,),
    "clip_qkv": (0.3,),
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    *({**YARN, **more} for more in ({}, {"mscale": 0.7}, {"partial_rotary_factor": 0.5})),
    {**YARN, "attention_factor": 0.7, "beta_fast": 20, "beta_slow": 3},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False},
    {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    *({"rope_type": "default", "partial_rotary_factor": factor} for factor in (0.25, 0.5, 1.0)),
    {"rope_type": "default", "rope_theta": 37.5},
)
# Fields of tokens, lengths, files, training and outputs, and the copy of another field.
LEFT_OUT = frozenset(
    {
        *("vocab_size", "max_position_embeddings", "model_max_length", "num_hidden_layers", "n_layer"),
        *("initializer_range", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "chunk_size_feed_forward", "dtype", "is_encoder_decoder", "problem_type"),
        *("id2label", "label2id", "architectures", "model_type", "transformers_version", "hybrid_layer_ids"),
    }
)
# transformers reads partial_rotary_factor of Bamba only; Quire reads Bamba's GGUF files as Granite's.
IGNORED = {("granite-hybrid", "partial_rotary_factor")}


def other_values(name: str, value: Any, draw: random.Random) -> Iterator[Any]:
    if name in LEFT_OUT or name.endswith(("_id", "dropout", "pdrop")):
        return
    match value:
        case bool():
            yield not value
        case int() if "size" in name or name.endswith(("dim", "rank", "window")):
            yield from {value + 1, 2 * value, value // 2 or 1} - {value}
        case int():
            yield from {1, value + 1, 2 * value, value // 2} - {value}
        case float():
            yield from {1.0, 1.7 * value + 0.3} - {value}
        case str() if "act" in name:
            yield from ACTIVATIONS
        case None:
            yield from UNSET.get(name, (True, 3, 0.5))
        case list() if value and all(isinstance(each, str) for each in value):
            kinds = sorted({*value} | KINDS.get(name, set()))
            yield from ([draw.choice(kinds) for _ in value] for _ in range(3))
        case list() if value and all(isinstance(each, int | float) for each in value):
            yield from ([2 * each for each in value], value[::-1])
        case {"full_attention": {}, "sliding_attention": {}}:
            for kind in value:
                yield from ({**value, kind: {"rope_theta": 1e4, **rope}} for rope in ROPES)
        case {"rope_type": str()}:
            yield from ({"rope_theta": value.get("rope_theta", 1e4), **rope} for rope in ROPES)
        case _:
            pass


def make(family: Family, fields: Mapping[str, Any]) -> PreTrainedModel | None:
    """None if transformers refuses the configuration."""
    names = (f"{family.name}ForCausalLM", f"{family.name}LMHeadModel")
    model_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    try:
        config = getattr(transformers, family.config or f"{family.name}Config")(**copy.deepcopy({**COMMON, **fields}))
        model = model_class(config).eval()
    except Exception:
        return None
    randomize(model, seed=0)
    return model


def difference(directory: Path, reference: PreTrainedModel, sequence: list[int]) -> float:
    """The largest difference of logits, as a part of the largest logit. Raises ConfigurationError if Quire refuses."""
    runner = PagedRunner(
        load_model(directory, device=torch.device("cpu"), dtype=torch.float32), [sequence], block_size=16
    )
    found = torch.cat([runner.step(Span(0, start, end)) for start, end in itertools.pairwise(CUTS)])
    expected = expected_logits(reference, sequence)
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def is_usable(model: PreTrainedModel, sequence: list[int]) -> bool:
    """Whether transformers computes something."""
    try:
        return bool(expected_logits(model, sequence).isfinite().all())
    except Exception:
        return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in FOREIGN])
def test_another_value_changes_logits_as_in_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    family, draw, wrong, num_served = FAMILIES[name], random.Random(name), list[str](), 0
    sequences = make_sequences(LENGTH, LENGTH)
    plain = make(family, family.fields)
    assert plain is not None
    for field, usual in sorted(plain.config.to_dict().items()):
        for value in other_values(field, usual, draw):
            if any(field == "rope_parameters" and part in value for model, part in IGNORED if model == name):
                continue
            model = make(family, {**family.fields, field: value})
            if model is None or not is_usable(model, sequences[0]):
                continue
            model.save_pretrained(tmp_path)
            try:
                # In one sequence a router may choose the other one of two experts that are nearly equal.
                is_wrong = all(difference(tmp_path, model, sequence) > TOLERANCE for sequence in sequences)
            except ConfigurationError:
                continue
            num_served += 1
            if is_wrong:
                wrong.append(f"{field} is {value!r}, not {usual!r}")
    assert not wrong
    assert num_served > 10
