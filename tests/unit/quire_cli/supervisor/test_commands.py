"""`quire serve` has the flags of all services, and passes each service the flags that it knows."""

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gateway.settings import GatewaySettings
from quire.runtime.settings import ConfigurationError, load_settings, to_argv
from quire.service.model_flag import ModelFlag
from quire_cli.supervisor.commands import Commands, Programs, child_environ
from quire_cli.supervisor.models import check_memory, niceness_of, shares_of_memory
from quire_cli.supervisor.server import check_servable
from quire_cli.supervisor.settings import ServeSettings
from scheduler_svc.settings import SchedulerSettings
from tests.support.adapter_files import write_adapter
from tests.support.certificates import make_certificates
from tests.support.embedding_models import make_embedding_model
from worker_svc.settings import WorkerSettings

SERVICES = (GatewaySettings, SchedulerSettings, WorkerSettings)
# Settings that the supervisor decides itself.
OWN = {
    "listen",
    "workers",
    "schedulers",
    "metrics_port",
    # Other replicas fetch blocks there; `quire serve` has one.
    "transfer_endpoint",
    "transfer_listen",
    "reuse_port",
    "hand_over",
    # With one replica there is no choice.
    "routing",
    "long_prompt",
    "demo_socket",
    "local_socket",
    "log_level",
    "tensor_parallel_rank",
    "tensor_parallel_address",
    "kv_cache_file",
    "memory_share",
    "metrics_model",
    # A worker adds it to its own command if a sleep discards its weights.
    "load",
    "response_store",
}
PROGRAMS = Programs(worker=("/w",), scheduler=("/s",), gateway=("/g",))


def values_of(settings: Any) -> dict[str, object]:
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def make_commands(**settings) -> Commands:
    return Commands(ServeSettings(**settings), PROGRAMS, Path("/run/q"))


@pytest.mark.parametrize("cls", SERVICES)
def test_every_flag_of_a_service_is_one_of_serve_or_the_supervisor_decides_it(cls: type) -> None:
    # A worker has one of the models.
    assert set(values_of(cls())) - set(values_of(ServeSettings())) - {"model"} <= OWN


def test_the_services_get_their_flags_and_each_other() -> None:
    flags = (
        "--model=/m --max-num-seqs=7 --num-gpu-blocks=9 --worker-metrics-port=1 --log-level=debug --swap-space=1.5GiB"
    )
    served = load_settings(ServeSettings, flags.split(), {}, program="quire serve")
    commands = Commands(served, PROGRAMS, Path("/run/q"))
    worker = load_settings(WorkerSettings, commands.worker(0)[1:], {}, program="w")
    scheduler = load_settings(SchedulerSettings, commands.scheduler()[1:], {}, program="s")
    gateway = load_settings(GatewaySettings, commands.gateway(0, 11, 12)[1:], {}, program="g")
    assert (worker.listen, worker.model, worker.max_num_seqs, worker.num_gpu_blocks) == (
        "unix:/run/q/worker.sock",
        "/m",
        7,
        9,
    )
    assert (worker.metrics_port, scheduler.metrics_port, worker.swap_space) == (1, None, 3 << 29)
    assert (scheduler.listen, scheduler.workers, scheduler.max_num_seqs) == (
        "unix:/run/q/scheduler.sock",
        ("unix:/run/q/worker.sock",),
        7,
    )
    assert (gateway.grpc_port, gateway.http_port, gateway.models) == (11, 12, (ModelFlag(None, "/m"),))
    assert gateway.schedulers == ("unix:/run/q/scheduler.sock",)
    assert {worker.log_level, scheduler.log_level, gateway.log_level} == {"debug"}


def test_each_rank_gets_its_number_its_share_of_the_threads_and_where_to_meet() -> None:
    commands = Commands(ServeSettings(tensor_parallel_size=2, worker_metrics_port=1), PROGRAMS, Path("/run/q"), (4711,))
    ranks = [load_settings(WorkerSettings, commands.worker(rank)[1:], {}, program="w") for rank in (0, 1)]
    assert [(each.tensor_parallel_rank, each.tensor_parallel_size) for each in ranks] == [(0, 2), (1, 2)]
    assert {each.tensor_parallel_address for each in ranks} == {"127.0.0.1:4711"}
    assert [each.metrics_port for each in ranks] == [1, None]
    assert ranks[0].num_threads == ranks[1].num_threads == max(len(os.sched_getaffinity(0)) // 2, 1)
    scheduler = load_settings(SchedulerSettings, commands.scheduler()[1:], {}, program="s")
    assert scheduler.workers == tuple(each.listen for each in ranks)


def test_gateways_share_two_ports_and_have_all_others_for_themselves() -> None:
    commands = make_commands(gateways=3, admin_port=7000, gateway_metrics_port=9100)
    gateways = [
        load_settings(GatewaySettings, commands.gateway(number, 11, 12)[1:], {}, program="g") for number in range(3)
    ]
    alone = load_settings(GatewaySettings, make_commands().gateway(0, 11, 12)[1:], {}, program="g")
    assert (alone.reuse_port, alone.hand_over) == (True, False)
    assert {(each.grpc_port, each.http_port, each.reuse_port) for each in gateways} == {(11, 12, True)}
    assert all(each.hand_over for each in gateways)
    assert [each.admin_port for each in gateways] == [7000, 7001, 7002]
    assert [each.metrics_port for each in gateways] == [9100, 9101, 9102]
    sockets = [f"unix:{each.local_socket}" for each in gateways]
    assert sockets == [commands.gateway_address(number) for number in range(3)]
    assert len(set(sockets)) == 3
    # Port 0 lets each gateway pick its own, and no port stays no port.
    picking = [make_commands(gateways=2, admin_port=0).gateway(number, 11, 12)[1:] for number in range(2)]
    for each in (load_settings(GatewaySettings, flags, {}, program="g") for flags in picking):
        assert (each.admin_port, each.metrics_port) == (0, None)


def test_gateways_keep_responses_where_the_others_and_the_next_ones_find_them() -> None:
    for flags, place in (
        ({}, "sqlite:/run/q/responses.db"),
        ({"gateways": 2}, "sqlite:/run/q/responses.db"),
        ({"gateways": 2, "response_store": "sqlite:/kept.db"}, "sqlite:/kept.db"),
    ):
        command = make_commands(**flags).gateway(0, 11, 12)
        assert load_settings(GatewaySettings, command[1:], {}, program="g").response_store == place


def test_defaults_stay_defaults() -> None:
    commands = make_commands()
    arguments = (commands.gateway(0, 50051, 8000), commands.scheduler(), commands.worker(0))
    for cls, command in zip(SERVICES, arguments, strict=True):
        given = values_of(load_settings(cls, command[1:], {}, program="x"))
        assert {name for name, value in values_of(cls()).items() if value != given[name]} <= OWN, cls


def test_the_services_inherit_the_environment_but_for_our_variables() -> None:
    environ = child_environ({"PATH": "/bin", "QUIRE_MODEL": "x", "PYTHONPATH": "/p"})
    assert (environ["PATH"], "QUIRE_MODEL" in environ) == ("/bin", False)
    code, _, rest = environ["PYTHONPATH"].partition(os.pathsep)
    assert (Path(code) / "quire_cli" / "supervisor").is_dir()
    assert rest == "/p"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--max-message-bytes=1000", "^--max-message-bytes: .* the least value is 1024$"),
        ("--public-cert=x.pem", "--public-cert and --public-key go together"),
        ("--public-key=x.key", "--public-cert and --public-key go together"),
        ("--tls-client-auth", "--tls-dir"),
        ("--grpc-port=70000", "^--grpc-port: .* the greatest value is 65535$"),
        # The ports of three gateways would exceed the last one.
        ("--gateways=3 --admin-port=65534", "^--admin-port is 65534; 3 gateways .* at most 65533$"),
    ],
)
def test_what_a_service_would_refuse_is_refused_before_anything_starts(flags: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        load_settings(ServeSettings, flags.split(), {}, program="quire serve")
    fits = ["--gateways=3", "--admin-port=65533", "--tls-client-auth", "--tls-dir=certs"]
    assert load_settings(ServeSettings, fits, {}, program="quire serve").tls_client_auth


def test_a_public_certificate_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    settings = ServeSettings(public_cert=tmp_path / "gateway.pem", public_key=tmp_path / "worker.key")
    with pytest.raises(ConfigurationError, match=r"worker\.key"):
        check_servable(settings)
    check_servable(ServeSettings(public_cert=tmp_path / "gateway.pem", public_key=tmp_path / "gateway.key"))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"max_adapters": 0}, "--max-adapters is 0; give it a number above 0"),
        ({"device": "cuda"}, "--max-adapters is 0 by default on cuda; give it a number above 0"),
        ({"device": "cuda", "max_adapters": 1}, "its rank is 65, and --max-adapter-rank 64; raise that to at least"),
        ({"max_adapter_rank": 16}, "its rank is 65, and --max-adapter-rank 16; raise that to at least the rank"),
        ({"model_impl": "transformers"}, "this model runs through transformers' code, which takes no adapters; leave "),
    ],
)
def test_adapters_that_the_worker_would_not_take_are_refused_before_anything_starts(
    tmp_path: Path, flags: dict[str, Any], problem: str
) -> None:
    adapters = (f"sql={write_adapter(tmp_path, {'model.layers.0.self_attn.q_proj': (65, 64, 64)})}",)
    with pytest.raises(ConfigurationError) as caught:
        check_servable(ServeSettings(adapters=adapters, **flags))
    assert str(caught.value).startswith(f"--adapters has {adapters[0]}: {problem}")
    check_servable(ServeSettings(adapters=adapters))


def test_keys_that_are_flags_are_in_no_command_line_of_a_gateway() -> None:
    served = ServeSettings(api_keys=("secret-key",), keys_files=(Path("/keys.json"),))
    commands = Commands(served, PROGRAMS, Path("/run/q"), probe_keys=Path("/run/q/probe-keys.json"))
    gateway = load_settings(GatewaySettings, commands.gateway(0, 11, 12)[1:], {}, program="g")
    assert gateway.keys_files == (Path("/keys.json"), Path("/run/q/probe-keys.json"))
    assert not gateway.api_keys
    assert not any("secret-key" in each for each in commands.gateway(0, 11, 12))


@pytest.mark.parametrize("flag", ["--api-key", "--keys-file"])
def test_a_key_that_a_shell_left_empty_opens_no_server(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{flag}.* is empty"):
        load_settings(ServeSettings, [flag, ""], {}, program="quire serve")
    variable = "QUIRE_" + flag.removeprefix("--").replace("-", "_").upper()
    with pytest.raises(ConfigurationError, match=f"{variable}.* is empty"):
        load_settings(ServeSettings, [], {variable: ""}, program="quire serve")
    with_none = load_settings(ServeSettings, [], {variable: ","}, program="quire serve")
    assert not with_none.requires_keys
    assert not load_settings(ServeSettings, to_argv(ServeSettings, {"api_keys": ()}), {}, program="s").api_keys


@pytest.mark.parametrize("key", ["", "a b", "a\n", "x" * 513, "clé"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="--api-key has a key") as raised:
        ServeSettings(api_keys=(key,))
    assert not key or key not in str(raised.value)


def test_each_of_several_models_has_processes_sockets_and_ports_of_its_own(tmp_path: Path) -> None:
    flags = ["--model=a=/a", "--model=org/b=/b,dtype=float32,tool-call-parser=hermes", "--worker-metrics-port=7000"]
    served = load_settings(ServeSettings, [*flags, "--tensor-parallel-size=2"], {}, program="quire serve")
    pools = ([tmp_path / "a0", tmp_path / "a1"], [tmp_path / "b0", tmp_path / "b1"])
    commands = Commands(served, PROGRAMS, Path("/run/q"), (1, 2), None, pools, (0.5, 0.25))
    names = [commands.worker_name(rank, model) for model in commands.models for rank in commands.ranks(model)]
    assert names == ["worker", "worker-1", "worker-org/b", "worker-org/b-1"]
    workers = [
        load_settings(WorkerSettings, commands.worker(rank, model)[1:], {}, program="w")
        for model in commands.models
        for rank in commands.ranks(model)
    ]
    assert [(each.model, each.dtype, each.metrics_port, each.memory_share) for each in workers] == [
        ("/a", "auto", 7000, 0.5),
        ("/a", "auto", None, 0.5),
        ("/b", "float32", 7001, 0.25),
        ("/b", "float32", None, 0.25),
    ]
    assert [each.kv_cache_file for each in workers] == [*pools[0], *pools[1]]
    assert [each.tensor_parallel_address[-1] for each in workers] == ["1", "1", "2", "2"]
    schedulers = [
        load_settings(SchedulerSettings, commands.scheduler(model)[1:], {}, program="s") for model in commands.models
    ]
    listening = [each.listen for each in (*workers, *schedulers)]
    assert len(set(listening)) == len(listening)
    assert all(len(each.removeprefix("unix:").rpartition("/")[2]) < 40 for each in listening)
    assert [each.workers for each in schedulers] == [tuple(listening[:2]), tuple(listening[2:4])]
    gateway = load_settings(GatewaySettings, commands.gateway(0, 11, 12)[1:], {}, program="g")
    assert [str(each) for each in gateway.models] == ["a=/a", "org/b=/b,tool-call-parser=hermes"]
    found = [gateway.of_model(each).schedulers for each in gateway.models]
    assert found == [(each.listen,) for each in schedulers]


def test_models_without_a_given_pool_share_the_memory_and_encoders_need_none(tmp_path: Path) -> None:
    encoder = make_embedding_model(tmp_path / "encoder")
    given = ["--model=a=quire-tiny", "--model=b=quire-tiny", f"--model=c={encoder}"]
    with patch("quire_cli.supervisor.models.available_memory", lambda: 8 << 30):
        served = load_settings(ServeSettings, given, {}, program="quire serve")
        parts = [served.of_model(each) for each in served.served_models]
        assert shares_of_memory(parts) == [0.5, 0.5, 1.0]
        assert niceness_of(served)[:2] == [0, 0] < niceness_of(served)[2:]
        given[0] += ",kv-cache-memory=2GiB"
        given[2] += ",worker-niceness=3"
        served = load_settings(ServeSettings, given, {}, program="quire serve")
        parts = [served.of_model(each) for each in served.served_models]
        assert shares_of_memory(parts) == [1.0, 0.75, 1.0]
        assert niceness_of(served) == [0, 0, 3]
        check_memory(parts)
        given[1] += ",kv-cache-memory=7GiB"
        served = load_settings(ServeSettings, given, {}, program="quire serve")
        with pytest.raises(
            ConfigurationError, match=r"all models take 9\..* GiB \(a .*, b .*, c .*\); 8.0 GiB of memory"
        ):
            check_servable(served)
    alone = ServeSettings(models=(ModelFlag(None, str(encoder)),))
    assert niceness_of(alone) == [0]
