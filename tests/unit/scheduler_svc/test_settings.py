import pytest

from quire.runtime.settings import ConfigurationError, load_settings
from scheduler_svc.settings import SchedulerSettings


def load(*argv: str) -> SchedulerSettings:
    return load_settings(SchedulerSettings, argv, {}, program="quire scheduler")


@pytest.mark.parametrize("address", ["worker-0:50053", "10.0.0.7:50053", "[::1]:50053", "unix:/run/worker.sock"])
def test_workers_are_where_workers_can_listen(address: str) -> None:
    assert load(f"--workers={address}").workers == (address,)


@pytest.mark.parametrize("address", ["worker-0", "worker-0:", "worker-0:65536", ":50053", "unix:"])
def test_a_worker_without_an_address_to_connect_to_is_refused_by_name(address: str) -> None:
    with pytest.raises(ConfigurationError, match=f'^--workers: address "{address}" '):
        load(f"--workers=127.0.0.1:50053,{address}")


@pytest.mark.parametrize("workers", ["", "127.0.0.1:1,127.0.0.1:1"])
def test_each_rank_has_one_worker(workers: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--workers .* must be one address for each rank"):
        load(f"--workers={workers}")


def test_a_step_that_is_too_small_for_its_sequences_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--max-num-batched-tokens is 16; .* --max-num-seqs \(32\)"):
        load("--max-num-seqs=32", "--max-num-batched-tokens=16")


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://indexer:5557", "tcp://[::]:5557", "ipc:///run/events"])
def test_events_go_where_zeromq_can_listen_or_connect(address: str) -> None:
    assert load("--kv-events", address).kv_events == address


@pytest.mark.parametrize("address", ["5557", "tcp://*", "tcp://*:0", "tcp://*:65536", "udp://*:1", "ipc://"])
def test_an_address_of_events_that_zeromq_cannot_use_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--kv-events: .* expected tcp://HOST:PORT, .* ipc://PATH"):
        load("--kv-events", address)


@pytest.mark.parametrize(("flag", "value"), [("replay", "=tcp://*:5558"), ("topic", "=kv@a@b"), ("disk", "")])
def test_what_belongs_to_events_goes_with_them(flag: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--kv-events-{flag} needs --kv-events ADDRESS"):
        load(f"--kv-events-{flag}{value}")


def test_more_kept_events_than_zeromq_counts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--kv-events-buffer: .* the greatest value is 1073741824"):
        load("--kv-events=ipc:///run/events", f"--kv-events-buffer={1 << 31}")
