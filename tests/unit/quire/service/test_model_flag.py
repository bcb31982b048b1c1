"""The texts of `--model`: directories, names and flags of one model."""

from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from quire.runtime.settings import ConfigurationError, load_settings, to_argv
from quire.service.model_flag import ModelFlag
from quire_cli.supervisor.settings import ServeSettings


@pytest.mark.parametrize(
    ("text", "name", "source", "overrides"),
    [
        ("/models/llama", "llama", "/models/llama", ()),
        ("models/llama", "models/llama", "models/llama", ()),
        ("Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@main", ()),
        ("quire-tiny", "quire-tiny", "quire-tiny", ()),
        ("chat=/models/llama", "chat", "/models/llama", ()),
        ("a/b=Qwen/Qwen3-0.6B", "a/b", "Qwen/Qwen3-0.6B", ()),
        ("/odd=dir/llama", "llama", "/odd=dir/llama", ()),
        ("./a,b", "a,b", "./a,b", ()),
        ("/m,dtype=float32", "m", "/m", (("dtype", "float32"),)),
        (
            "x=/m,speculate=ngram,grammar,kv-cache-memory=1GiB",
            "x",
            "/m",
            (("speculate", "ngram,grammar"), ("kv-cache-memory", "1GiB")),
        ),
    ],
)
def test_a_text_is_read_and_written_again(text: str, name: str, source: str, overrides: tuple) -> None:
    flag = ModelFlag.parse(text)
    assert (flag.name, flag.source, tuple(flag.overrides)) == (name, source, overrides)
    assert ModelFlag.parse(str(flag)) == flag


def test_an_existing_path_is_a_path_whatever_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b,dtype=c").mkdir()
    assert ModelFlag.parse("a=b,dtype=c") == ModelFlag(None, "a=b,dtype=c")


@pytest.mark.parametrize("text", ["", " ", "=dir", "name=", "-x=/m", "two words=/m", "a\0"])
def test_a_text_without_a_name_or_a_directory_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--model: .*expected"):
        load_settings(ServeSettings, [f"--model={text}"], {}, program="quire serve")


def serve(*flags: str) -> ServeSettings:
    return load_settings(ServeSettings, flags, {}, program="quire serve")


def test_flags_of_one_model_change_only_its_settings() -> None:
    settings = serve(
        "--dtype=bfloat16", "--model=a=/a,dtype=float32,idle-unload=5", "--model=b=/b,tool-call-parser=hermes"
    )
    a, b = (settings.of_model(each) for each in settings.served_models)
    assert [(each.dtype, each.idle_unload, each.tool_call_parser) for each in (a, b)] == [
        ("float32", 5.0, None),
        ("bfloat16", 0.0, "hermes"),
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--model=a=/x", "--model=a=/y"], "--model has the name a twice; give each model its own: --model NAME=DIR"),
        (["--model=/x/m", "--model=/y/m"], "--model has the name m twice"),
        (["--model=/m,dtpye=float32"], "--model m: dtpye is no flag that one model may have; these are: .*dtype"),
        (["--model=/m,http-port=1"], "--model m: http-port is no flag that one model may have"),
        (["--model=/m,dtype=float8"], '--model m: dtype: "float8" is not valid: expected one of auto, float32'),
        (["--model=/m,num-gpu-blocks=1,kv-cache-memory=1GiB"], r"--model m: --num-gpu-blocks \(1\) and"),
        (["--model=/m", "--model=/n", "--served-model-name=x"], "--served-model-name is of one model, and there are"),
        (["--model=/m", "--model=/n", "--record=f"], "--record is of one model.*NAME=DIR,record=VALUE"),
    ],
)
def test_what_cannot_be_is_refused_with_the_model(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        serve(*flags)


def gateway(*flags: str) -> GatewaySettings:
    return load_settings(GatewaySettings, flags, {}, program="quire gateway")


def test_a_gateway_gives_each_model_its_schedulers() -> None:
    settings = gateway("--model=a=/a", "--model=/models/b,tool-call-parser=hermes", "--schedulers=h:1,b=h:2,b=h:3,h:4")
    a, b = (settings.of_model(each) for each in settings.served_models)
    assert (a.schedulers, b.schedulers) == (("h:1", "h:4"), ("h:2", "h:3"))
    assert (a.served_model_name, b.served_model_name, b.tool_call_parser) == ("a", "b", "hermes")
    again = gateway(*to_argv(GatewaySettings, {"models": settings.models, "schedulers": settings.schedulers}))
    assert again.models == settings.models


@pytest.mark.parametrize(
    ("schedulers", "problem"),
    [
        ("h:1", "--schedulers has no address of the model b; add b=ADDRESS"),
        ("h:1,c=h:2", "--schedulers has c=h:2, and no model is called c; models are a, b"),
        ("h:1,b=h:1", "--schedulers names an address twice"),
        ("b=h:1", "--schedulers has no address of the model a"),
    ],
)
def test_a_gateway_refuses_schedulers_that_leave_a_model_out(schedulers: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        gateway("--model=a=/a", "--model=b=/b", f"--schedulers={schedulers}")
