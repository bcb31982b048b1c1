import pytest

from quire.runtime.settings import ConfigurationError, load_settings
from quire_cli.supervisor.settings import ServeSettings
from worker_svc.settings import WorkerSettings


def load(*argv: str, program: str = "worker") -> WorkerSettings | ServeSettings:
    cls = {"worker": WorkerSettings, "serve": ServeSettings}[program]
    return load_settings(cls, argv, {}, program=f"quire {program}")


@pytest.mark.parametrize("program", ["worker", "serve"])
@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--kv-disk-space=1GiB"], r"--kv-disk-space is 1073741824, and there is no --kv-disk; give --kv-disk DIR"),
        (["--num-gpu-blocks=9", "--kv-cache-memory=1MiB"], r"--num-gpu-blocks \(9\) and --kv-cache-memory \(1048576\)"),
        # OpenMP ends a process that cannot have its threads, so that it would restart without end.
        (["--num-threads=1000000"], r"--num-threads: .* the greatest value is 1024"),
        (["--speculate=off,ngram"], r"--speculate is off,ngram; off excludes the others"),
    ],
)
def test_flags_that_contradict_each_other_or_have_no_effect_are_refused(
    program: str, argv: list[str], error: str
) -> None:
    with pytest.raises(ConfigurationError, match=error):
        load(*argv, program=program)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--persistent-kv-cache=on"], r"--persistent-kv-cache is on, .* give --kv-cache-file PATH"),
        (["--persistent-kv-cache=off", "--kv-cache-file=/dev/shm/kv"], r"--kv-cache-file is /dev/shm/kv, .* is off"),
        (["--transfer-endpoint=worker-0"], r'--transfer-endpoint: address "worker-0" is not HOST:PORT'),
        (["--tensor-parallel-size=2", "--tensor-parallel-address=worker-0"], r'"worker-0" is not HOST:PORT'),
        (["--tensor-parallel-size=2", "--tensor-parallel-address=unix:/run/q:1"], r"unix:/run/q:1; it must be HOST"),
    ],
)
def test_what_a_worker_would_ignore_or_cannot_use_is_refused(argv: list[str], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        load(*argv)


def test_what_goes_together_is_taken() -> None:
    load("--kv-disk=/srv/kv", "--kv-disk-space=1GiB", "--num-gpu-blocks=9", "--speculate=auto,shared")
    load("--kv-cache-memory=1MiB", "--persistent-kv-cache=on", "--kv-cache-file=/dev/shm/kv", "--speculate=off")
    load("--transfer-endpoint=[::1]:50153", "--tensor-parallel-size=2", "--tensor-parallel-address=[::1]:50063")
    load("--kv-disk=/srv/kv", "--persistent-kv-cache=on", program="serve")
