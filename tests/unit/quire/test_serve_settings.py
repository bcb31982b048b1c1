"""`quire serve` has the flags of all services, and hands each what it knows."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import GatewaySettings
from quire.local.commands import Commands, Programs, child_environ
from quire.local.settings import ServeSettings
from quire.settings import ConfigurationError, load_settings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

SERVICES = pytest.mark.parametrize("cls", [GatewaySettings, SchedulerSettings, WorkerSettings])
# What the supervisor decides itself.
OWN = {"listen", "workers", "schedulers", "metrics_port", "log_level"}
PROGRAMS = Programs(worker=("/w",), scheduler=("/s",), gateway=("/g",))


def values_of(settings: Any) -> dict[str, object]:
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def make_commands(**settings) -> Commands:
    return Commands(ServeSettings(**settings), PROGRAMS, Path("/run/q"))


@SERVICES
def test_every_flag_of_a_service_is_one_of_serve_with_the_same_default(cls: type) -> None:
    served = {field.name: field.default for field in dataclasses.fields(ServeSettings)}
    for field in dataclasses.fields(cls):
        if field.name not in OWN:
            assert served[field.name] == field.default, field.name


def test_the_services_get_their_flags_and_each_other() -> None:
    commands = make_commands(model="/m", max_num_seqs=7, num_gpu_blocks=9, worker_metrics_port=1, log_level="debug")
    worker = load_settings(WorkerSettings, commands.worker()[1:], {}, program="w")
    scheduler = load_settings(SchedulerSettings, commands.scheduler()[1:], {}, program="s")
    gateway = load_settings(GatewaySettings, commands.gateway(11, 12)[1:], {}, program="g")
    assert (worker.listen, worker.model, worker.max_num_seqs, worker.num_gpu_blocks) == (
        "unix:/run/q/worker.sock",
        "/m",
        7,
        9,
    )
    assert (worker.metrics_port, scheduler.metrics_port) == (1, None)
    assert (scheduler.listen, scheduler.workers, scheduler.max_num_seqs) == (
        "unix:/run/q/scheduler.sock",
        ("unix:/run/q/worker.sock",),
        7,
    )
    assert (gateway.grpc_port, gateway.http_port, gateway.model) == (11, 12, "/m")
    assert gateway.schedulers == ("unix:/run/q/scheduler.sock",)
    assert {worker.log_level, scheduler.log_level, gateway.log_level} == {"debug"}


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("1.5GiB", 3 << 29)])
def test_the_swap_space_reaches_the_worker(text: str, size: int) -> None:
    served = load_settings(ServeSettings, [f"--swap-space={text}"], {}, program="quire serve")
    command = Commands(served, PROGRAMS, Path("/run/q")).worker()
    assert load_settings(WorkerSettings, command[1:], {}, program="w").swap_space == size


def test_a_swap_space_that_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'^--swap-space: "-1" is not valid: expected a size such as'):
        load_settings(ServeSettings, ["--swap-space=-1"], {}, program="quire serve")


@pytest.mark.parametrize(("cls", "command"), [(WorkerSettings, "worker"), (SchedulerSettings, "scheduler")])
def test_defaults_stay_defaults(cls: type, command: str) -> None:
    settings = load_settings(cls, getattr(make_commands(), command)()[1:], {}, program="x")
    changed = {name for name, value in values_of(settings).items() if value != values_of(cls())[name]}
    assert changed <= OWN


def test_the_services_inherit_the_environment_but_for_our_variables() -> None:
    environ = child_environ({"PATH": "/bin", "QUIRE_MODEL": "x", "PYTHONPATH": "/p"})
    assert environ["PATH"] == "/bin"
    assert "QUIRE_MODEL" not in environ
    code, _, rest = environ["PYTHONPATH"].partition(os.pathsep)
    assert (Path(code) / "quire" / "local").is_dir()
    assert rest == "/p"
