"""The worker's flags and environment."""

from dataclasses import dataclass
from pathlib import Path

from quire.rpc.address import TcpAddress, check_address
from quire.runtime.settings import parse_bytes, setting
from quire.service.service_flags import ModelFlags, ProcessFlags, ReplicaFlags, StepFlags


@dataclass(frozen=True)
class WorkerFlags(StepFlags):
    """How workers load and run the model, and their memory."""

    model_impl: str = setting(
        "auto",
        "implementation of the model; auto uses transformers' if Quire has none for the architecture",
        choices=("auto", "native", "transformers"),
    )
    device: str = setting("auto", "device of the model; auto is cpu", choices=("auto", "cpu", "cuda"), common=True)
    dtype: str = setting(
        "auto",
        "type of weights and KV pool; auto uses the model's, but float32 for float64, and on cpu bfloat16 for float16",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = setting(
        "none",
        "how linear layers are rounded: int8-weight-only rounds their weights to int8 when they are loaded, "
        "int8-dynamic their inputs too; weights that are quantized stay as they are with none and int8-dynamic",
        choices=("none", "int8-weight-only", "int8-dynamic"),
        common=True,
    )
    kv_cache_dtype: str = setting(
        "auto", "type of the KV pool; auto uses --dtype, int8 holds about twice the tokens", choices=("auto", "int8")
    )
    cuda_graphs: str = setting(
        "off",
        "whether decode steps on cuda are replayed as CUDA graphs, recorded at start; never run on a GPU yet",
        choices=("on", "off"),
    )
    block_size: int = setting(16, "tokens per KV block", minimum=1, maximum=1024)
    kv_cache_memory: int | None = setting(
        None,
        "memory of the KV pool, allocated in full; not given, on cpu the need of max_num_seqs sequences of "
        "max_model_len tokens, at most 1GiB or half of the available memory, on cuda the remaining memory",
        parse=parse_bytes,
        metavar="BYTES",
        common=True,
    )
    persistent_kv_cache: str = setting(
        "auto",
        "whether the KV pool outlives a worker that is killed, in memory that quire serve holds, or in --kv-cache-file "
        "of a worker; auto: on cpu where such memory gets huge pages, since steps are slower without; off: never",
        choices=("auto", "on", "off"),
    )
    kv_disk: Path | None = setting(
        None,
        "directory on disk where full KV blocks are kept, so that a server that starts again with the same model and "
        "flags begins with them; for cpu",
        metavar="DIR",
    )
    kv_disk_space: int | None = setting(
        None,
        "disk space of all workers in --kv-disk; the blocks written or read longest ago give way; not given, 10GiB",
        parse=parse_bytes,
        metavar="BYTES",
    )
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use", minimum=0.05, maximum=1.0)
    num_gpu_blocks: int | None = setting(None, "blocks of the KV pool, instead of sizing it by memory", minimum=1)
    swap_space: int | None = setting(
        None,
        "host memory for swapped blocks, and on cuda for evicted ones, 0 for none; not given, on cpu the number of "
        "blocks of the KV pool and at most 1GiB, on cuda 4GiB, and at most half of what the KV pool leaves",
        parse=parse_bytes,
        metavar="BYTES",
    )
    max_num_seqs: int = setting(
        256, "maximum number of sequences that run at once, rows of the persistent batch", minimum=1, maximum=65536
    )
    max_num_batched_tokens: int = setting(2048, "maximum number of tokens of one step", minimum=1, maximum=1 << 20)
    max_model_len: int | None = setting(
        None,
        "maximum length of a sequence in tokens; not given, the model's, up to where its rotation changes",
        minimum=1,
        common=True,
    )
    num_threads: int | None = setting(
        None, "threads of one operation on cpu; not given, one for each available processor", minimum=1, maximum=1024
    )
    thread_binding: str = setting(
        "auto",
        "on cpu, auto binds each thread of an operation to a core if there are as many threads as cores or processors",
        choices=("auto", "off"),
    )
    max_adapters: int | None = setting(
        None,
        "LoRA adapters in memory at once, which the rows of a step may mix, 0 for none; not given, 8 on cpu for models "
        "that run through Quire's own code, else 0",
        minimum=0,
        maximum=1024,
    )
    max_adapter_rank: int | None = setting(
        None,
        "maximum rank of an adapter; not given, 256 on cpu and 64 on cuda, where memory for max_adapters of this rank "
        "is taken",
        minimum=1,
        maximum=256,
    )
    speculate: tuple[str, ...] = setting(
        ("auto",),
        "guesses of the next tokens, which a step verifies, so that it may give several; the text stays the same to "
        "the bit; prediction guesses what the caller predicts, grammar what a constraint forces, shared what followed "
        "the last tokens in earlier outputs of the same tenant and adapter, ngram what followed them in the sequence, "
        "draft what --draft-model says; for cpu; auto is prediction,grammar,ngram on cpu, else off",
        choices=("off", "auto", "prediction", "grammar", "shared", "ngram", "draft"),
        common=True,
    )
    draft_model: str | None = setting(
        None,
        "a small model with the tokenizer of --model, which drafts tokens if there is no other guess; for --speculate "
        "draft, one rank and cpu",
        metavar="DIR",
    )
    max_drafts: int = setting(7, "maximum number of tokens that a step guesses for a row", minimum=1, maximum=64)
    multi_step_ms: float = setting(
        24.0,
        "milliseconds for which decodes go on without a message to the scheduler: tokens of small models come "
        "faster, several at once; 0 is one token a step; for cpu and one rank",
        minimum=0,
        maximum=1000,
        metavar="MS",
        common=True,
    )
    tensor_parallel_size: int = setting(1, "ranks that share the model; each is a separate worker", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_disk_space is not None and self.kv_disk is None:
            raise ValueError(
                f"--kv-disk-space is {self.kv_disk_space}, and there is no --kv-disk; give --kv-disk DIR, or leave both"
                " out"
            )
        if self.num_gpu_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError(
                f"--num-gpu-blocks ({self.num_gpu_blocks}) and --kv-cache-memory ({self.kv_cache_memory}) both say how "
                "large the KV pool is; give one of them"
            )
        if "off" in self.speculate and len(set(self.speculate)) > 1:
            raise ValueError(f"--speculate is {','.join(self.speculate)}; off excludes the others, or leave it out")


@dataclass(frozen=True)
class WorkerSettings(ModelFlags, WorkerFlags, ReplicaFlags, ProcessFlags):
    """Holds the KV pool and the model, and runs the scheduler's steps."""

    listen: str = setting("127.0.0.1:50053", "address to listen on: HOST:PORT or unix:PATH")
    kv_cache_file: Path | None = setting(
        None,
        "file in memory for the KV pool, as on /dev/shm, that outlives this process: its next start with the same "
        "model and flags finds the blocks in it; for cpu",
    )
    load: str = setting(
        "at-start",
        "when the model is loaded; when-attached: with the first scheduler that attaches the worker, as after a sleep "
        "that discarded the weights",
        choices=("at-start", "when-attached"),
    )
    memory_share: float = setting(
        1.0,
        "share of the memory of this machine that is available at start and that a KV pool without a given size counts "
        "with; `quire serve` divides the memory among its models",
        minimum=0.001,
        maximum=1,
    )
    transfer_endpoint: str | None = setting(
        None,
        "address at which workers of other replicas fetch KV blocks from this one; not given, the address in --workers "
        "of the scheduler, which they must also reach",
        metavar="HOST:PORT",
    )
    transfer_listen: str | None = setting(
        None,
        "another address to listen on, for workers of other replicas, where --listen is a unix socket",
        metavar="HOST:PORT",
    )
    tensor_parallel_rank: int = setting(0, "rank of this worker", minimum=0)
    tensor_parallel_address: str = setting(
        "127.0.0.1:50063", "address of the ranks' rendezvous: HOST:PORT, on which rank 0 listens for the others"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transfer_listen is not None and not self.listen.startswith("unix:"):
            raise ValueError(f"--transfer-listen is for a --listen that is a unix socket; it is {self.listen!r}")
        if self.tensor_parallel_rank >= self.tensor_parallel_size:
            raise ValueError(
                f"--tensor-parallel-rank is {self.tensor_parallel_rank}; it must be below --tensor-parallel-size "
                f"({self.tensor_parallel_size})"
            )
        if self.tensor_parallel_size > 1:
            where = check_address("--tensor-parallel-address", self.tensor_parallel_address)
            if not isinstance(where, TcpAddress):
                raise ValueError(f"--tensor-parallel-address is {where}; it must be HOST:PORT")
        if self.transfer_endpoint is not None:
            check_address("--transfer-endpoint", self.transfer_endpoint)
        if self.persistent_kv_cache == "on" and self.kv_cache_file is None:
            raise ValueError(
                "--persistent-kv-cache is on, and nothing holds the KV pool of this worker but itself; give "
                "--kv-cache-file PATH, or leave it out"
            )
        if self.persistent_kv_cache == "off" and self.kv_cache_file is not None:
            raise ValueError(
                f"--kv-cache-file is {self.kv_cache_file}, and --persistent-kv-cache is off; leave out one of them"
            )
