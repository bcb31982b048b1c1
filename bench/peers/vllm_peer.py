"""vLLM on the CPU, its engine stepped in this process."""

import json
import os
import statistics
import sys
import time

PROCESSORS = sorted(os.sched_getaffinity(0))


def make_engine(model):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    # Without it one processor is left free.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{PROCESSORS[0]}-{PROCESSORS[-1]}")
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")
    from vllm import LLM

    limits = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    return LLM(model, dtype="bfloat16", enable_prefix_caching=False, **limits).llm_engine


def run(engine, work, name):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    start, first, num_tokens = time.perf_counter(), {}, 0
    for index, (token_ids, num_output_tokens) in enumerate(work):
        params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True, detokenize=False)
        # What is new at each step, and not all that there is: it costs less.
        params.output_kind = RequestOutputKind.DELTA
        engine.add_request(f"{name}-{index}", {"prompt_token_ids": token_ids}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, time.perf_counter() - start)
                num_tokens += len(output.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "num_tokens": num_tokens, "first_token_s": statistics.median(first.values())}


def main():
    job = json.loads(sys.stdin.readline())
    # The engine prints to stdout as it starts.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = make_engine(job["model"])
    for number, work in enumerate(job["rounds"]):
        print(json.dumps(run(engine, work, number)), file=answers, flush=True)


if __name__ == "__main__":
    main()
