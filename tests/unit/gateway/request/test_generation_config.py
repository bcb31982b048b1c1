"""How the gateway uses each key of generation_config.json."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from gateway.request.generation_config import KEYS, ModelDefaults, Use, model_defaults
from gateway.request.parameters import check_choice, resolve
from quire.common.v1.common_pb2 import RowSampling
from quire.model_files.model_directory import ModelDirectory
from quire.rpc.errors import InvalidArgument
from quire.runtime.settings import ConfigurationError
from tests.support.parameters import make_options

DOCUMENT = Path(__file__).parents[4] / "docs" / "models.md"


@pytest.fixture
def read(tmp_path: Path):
    def defaults(**config: Any) -> ModelDefaults:
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}')
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return model_defaults(ModelDirectory.open(tmp_path))

    return defaults


def ids_of(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def test_the_table_has_each_key_of_transformers_and_no_other():
    assert KEYS.keys() == vars(GenerationConfig()).keys()


def test_the_document_has_the_table():
    section = DOCUMENT.read_text().split("\n## Generation config\n")[1].split("\n## ")[0]
    items = re.findall(r"^- \*\*(.+?)\*\*: ((?:.|\n  )+)", section, re.MULTILINE)
    assert {use: set(re.findall("`(.+?)`", keys)) for use, keys in items} == {
        use.value: {key for key, of_key in KEYS.items() if of_key is use} for use in Use
    }


def test_rules_for_every_request_are_read(read):
    defaults = read(
        suppress_tokens=[7, 3, 7],
        begin_suppress_tokens=[4],
        # The eos token is left out, as in transformers.
        bad_words_ids=[[5], [2], [2, 6], [5]],
        sequence_bias=[[[8, 9], -1.5], [[1], 2]],
        no_repeat_ngram_size=3,
        min_new_tokens=4,
        stop_strings=["###", "END"],
    )
    assert (defaults.suppressed, defaults.suppressed_first, defaults.no_repeat_ngram_size) == ((7, 3), (4,), 3)
    assert defaults.biases == (((5,), -math.inf), ((2, 6), -math.inf), ((8, 9), -1.5), ((1,), 2.0))
    assert (list(defaults.stopping.stop), defaults.stopping.min_tokens) == (["###", "END"], 4)
    assert defaults.never_generated == {7, 3, 5}


def test_a_sequence_bias_is_read_as_transformers_saves_it(read, tmp_path: Path):
    GenerationConfig(sequence_bias={(45, 7): -0.5, (3,): 2.0}).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert dict(read(**saved).biases) == {(45, 7): -0.5, (3,): 2.0}


def test_rules_come_to_a_row_without_tokens_that_the_model_has_no_logits_for():
    biases = (((1, 99), 2.0), ((1, 50), 2.0), ((5,), -math.inf))
    defaults = ModelDefaults(suppressed=(7, 50), suppressed_first=(50, 4), biases=biases, no_repeat_ngram_size=3)
    parameters = resolve(make_options(), defaults, (2,), rules=defaults.rules(50))
    row = RowSampling.FromString(parameters.row_sampling)
    assert (ids_of(row.suppress_token_ids), ids_of(row.begin_suppress_token_ids)) == ([7], [4])
    assert [(list(each.ids), each.bias) for each in row.sequence_biases] == [([5], -math.inf)]
    assert row.no_repeat_ngram_size == 3
    plain = RowSampling.FromString(resolve(make_options(), ModelDefaults(), (2,), rules=RowSampling()).row_sampling)
    assert plain == RowSampling.FromString(resolve(make_options(), ModelDefaults(), (2,)).row_sampling)


def test_a_request_wins_over_the_endings_of_the_model(read):
    defaults = read(min_new_tokens=4, stop_strings="###")
    row = RowSampling.FromString(resolve(make_options(), defaults, ()).row_sampling)
    assert row.stopping.min_tokens == 4
    asked = resolve(make_options(stopping={"min_tokens": 0, "stop": ["x"]}), defaults, ()).stopping
    assert (asked.min_tokens, list(asked.stop)) == (0, ["x"])
    assert list(resolve(make_options(), defaults, ()).stopping.stop) == ["###"]
    for sampling in ({"beam_search": {"beam_width": 2}}, {"n": 1, "best_of": 2}):
        assert list(resolve(make_options(sampling=sampling), defaults, ()).stopping.stop) == []
    assert list(resolve(make_options(sampling={"n": 2}), defaults, ()).stopping.stop) == ["###"]


def test_allowed_tokens_that_the_model_excludes_leave_no_choice():
    defaults = ModelDefaults(suppressed=(3,), biases=(((4,), -math.inf), ((5,), -9.0), ((6, 7), -math.inf)))
    for allowed, is_refused in (([3, 4], True), ([3, 5], False), ([4, 7], False)):
        parameters = resolve(make_options(sampling={"allowed_token_ids": allowed}), defaults, ())
        if is_refused:
            with pytest.raises(InvalidArgument, match="or are excluded by the model's generation_config"):
                check_choice(parameters, (), defaults)
        else:
            check_choice(parameters, (), defaults)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("suppress_tokens", 7, "a list of token ids"),
        ("suppress_tokens", [-1], "a list of token ids"),
        ("begin_suppress_tokens", [True], "a list of token ids"),
        ("begin_suppress_tokens", [2**31], "a list of token ids"),
        ("bad_words_ids", [7], "a list of lists of token ids"),
        ("bad_words_ids", [[]], "a list of lists of token ids"),
        *(
            ("sequence_bias", value, "a list of pairs of a list of token ids and a number")
            for value in ([[[1], "x"]], [[[1], True]], [[[], 1.0]], [[[1]]], [[1, 2]], [[[1], 1e39]], {"a": 1.0})
        ),
        ("sequence_bias", [[[1], math.nan]], "a list of pairs of a list of token ids and a number"),
        ("no_repeat_ngram_size", 2.5, "a whole number of at least 0"),
        ("min_new_tokens", -1, "a whole number of at least 0"),
        ("stop_strings", [""], "a text or a list of up to 64 texts"),
        ("stop_strings", ["a"] * 65, "a text or a list of up to 64 texts"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(read, key: str, value: object, expected: str):
    with pytest.raises(ConfigurationError, match=rf"^{key} in .*generation_config.json is .*, not {expected}$"):
        read(**{key: value})


def test_the_log_names_what_is_ignored_and_would_change_the_text(read, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    read(typical_p=1.0, num_beams=1, early_stopping=False, max_length=20, use_cache=True, pad_token_id=3, top_k=5)
    read(min_length=0, length_penalty=1.0, epsilon_cutoff=0.0, temperature=None, top_h=None)
    assert caplog.messages == []
    read(typical_p=0.5, num_beams=4, max_length=4096, chat_format="chatml", temperature=0.5)
    (line,) = caplog.messages
    assert line.endswith(
        "these keys are ignored: typical_p (0.5), num_beams (4), max_length (4096), chat_format ('chatml')"
    )
