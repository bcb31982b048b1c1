"""Settings that the gateway takes from a model directory and from its flags."""

import re

import pytest

from gateway.offload import FairExecutor
from gateway.replicas.events import Welcome
from gateway.request.limits import limits_of
from gateway.request.served_model import ServedModel
from gateway.settings import GatewaySettings
from quire.common.v1.common_pb2 import SamplingParameters
from quire.constraints.matcher import Vocabulary
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError, load_settings
from quire.service.compatibility import SCHEDULER_PROTOCOL, UNKNOWN_MODEL
from scheduler_svc.service import scheduler_servicer as servicer
from tests.support.tokenizers import byte_level, write_model_directory


@pytest.fixture
def executor():
    pool = FairExecutor(1)
    yield pool
    pool.shutdown()


def open_model(tmp_path, executor, **files):
    return ServedModel.open(write_model_directory(tmp_path / "m", byte_level(), **files), None, executor)


def test_generation_config_gives_the_defaults(tmp_path, executor):
    config = '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.25, "eos_token_id": [1, 7]}'
    model = open_model(tmp_path, executor, generation_config__json=config)
    assert model.name == "m"
    assert model.eos_token_ids == (1, 7)
    assert model.defaults.sampling == SamplingParameters(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.25)


def test_constraints_end_with_the_same_tokens_as_texts(tmp_path, executor):
    model = open_model(tmp_path, executor, tokenizer_config__json='{"eos_token": "a"}')
    directory = ModelDirectory.open(tmp_path / "m")
    assert model.eos_token_ids == (1, model.tokenizer.id_of("a"))
    assert Vocabulary.of_model(directory, None).eos == set(model.eos_token_ids)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("repetition_penalty", "0", "is 0; it must be in [1e-30, 10]"),
        ("repetition_penalty", "10.5", "is 10.5; it must be in [1e-30, 10]"),
        ("repetition_penalty", "NaN", "is nan; it must be in [1e-30, 10]"),
        ("temperature", "-1", "is -1; it must be in [0, 100]"),
        ("temperature", "NaN", "is nan; it must be in [0, 100]"),
        ("top_k", "-2", "is -2; it must be in [0, 4,294,967,295]"),
        ("top_k", "50.5", "is 50.5, not an integer"),
        ("top_p", "0", "is 0; it must be in (0, 1]"),
        ("top_p", "1" + 40 * "0", f"is {10**40:,}; it must be in (0, 1]"),
        ("min_p", "2", "is 2; it must be in [0, 1]"),
    ],
)
def test_a_default_out_of_range_is_a_configuration_error(tmp_path, executor, name, value, shown):
    with pytest.raises(ConfigurationError, match=f"^{name} in .*generation_config.json {re.escape(shown)}$"):
        open_model(tmp_path, executor, generation_config__json=f'{{"{name}": {value}}}')


def test_do_sample_false_is_greedy(tmp_path, executor):
    model = open_model(tmp_path, executor, generation_config__json='{"do_sample": false, "temperature": 0.6}')
    assert model.defaults.sampling.temperature == 0


def test_top_k_of_minus_one_is_all_tokens(tmp_path, executor):
    assert open_model(tmp_path, executor, generation_config__json='{"top_k": -1}').defaults.sampling.top_k == 0


def test_limits_are_those_that_hold_on_every_replica():
    one = Welcome(1, 100, 512, 16, 40, 0, 1, 1, "A", "float32", 20, SCHEDULER_PROTOCOL, UNKNOWN_MODEL)
    other = Welcome(1, 90, 1024, 8, 64, 0, 1, 1, "A", "float32", 3, SCHEDULER_PROTOCOL, UNKNOWN_MODEL)
    limits = limits_of(GatewaySettings(max_prompt_tokens=600), [one, other], 7)
    assert (limits.vocab_size, limits.max_model_len, limits.max_prompt_tokens, limits.max_logprobs) == (90, 512, 511, 3)
    assert [limits.longest_sequence(0, num_sequences) for num_sequences in (1, 2)] == [512, 257]
    assert limits_of(GatewaySettings(max_prompt_tokens=600), [other], 7).max_prompt_tokens == 600


@pytest.mark.parametrize(
    ("schedulers", "says"), [("", "empty"), ("a", "HOST:PORT"), ("a:1,a:1", "twice"), (",", "empty")]
)
def test_schedulers_must_be_addresses(schedulers, says):
    with pytest.raises(ConfigurationError, match=says):
        load_settings(GatewaySettings, ["--schedulers", schedulers], {}, program="quire gateway")


def load(*argv: str) -> GatewaySettings:
    return load_settings(GatewaySettings, argv, {}, program="quire gateway")


def test_the_longest_grace_is_what_schedulers_take():
    assert load("--reconnect-grace=600").reconnect_grace * 1000 == servicer._MAX_GRACE_PERIOD_MS
    with pytest.raises(ConfigurationError, match=r"--reconnect-grace.*the greatest value is 600"):
        load("--reconnect-grace=600.001")
