"""OpenVINO GenAI: continuous batching on the CPU, of a model that `optimum-cli export openvino` wrote."""

import json
import os
import statistics
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai


def make_pipeline(model):
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 4, 64, 2048
    scheduler.enable_prefix_caching = False
    threads = len(os.sched_getaffinity(0))
    return genai.ContinuousBatchingPipeline(
        model, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
    )


def run(pipeline, work, first_id):
    start, handles, first = time.perf_counter(), [], {}
    for index, (token_ids, num_output_tokens) in enumerate(work):
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_output_tokens
        config.ignore_eos, config.do_sample = True, False
        prompt = openvino.Tensor(np.array([token_ids], dtype=np.int64))
        handles.append(pipeline.add_request(first_id + index, prompt, config))
    while pipeline.has_non_finished_requests():
        pipeline.step()
        if len(first) < len(handles):
            now = time.perf_counter() - start
            for index, handle in enumerate(handles):
                if index not in first and handle.can_read():
                    first[index] = now
    seconds = time.perf_counter() - start
    num_tokens = sum(len(handle.read_all()[0].generated_ids) for handle in handles)
    return {"seconds": seconds, "num_tokens": num_tokens, "first_token_s": statistics.median(first.values())}


def main():
    job = json.loads(sys.stdin.readline())
    pipeline, first_id = make_pipeline(job["model"]), 0
    for work in job["rounds"]:
        print(json.dumps(run(pipeline, work, first_id)), flush=True)
        first_id += len(work)


if __name__ == "__main__":
    main()
