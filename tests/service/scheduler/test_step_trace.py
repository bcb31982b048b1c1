"""`--trace-steps`: every part of every step, in a file that a tracing page opens."""

import json
from collections import defaultdict

from tests.support.scheduler_process import GatewayStream, make_submit, running_scheduler, wait_attached


async def test_every_step_has_all_its_parts_in_order(worker, tmp_path):
    path = tmp_path / "steps.json"
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, trace_steps=str(path)) as scheduler:
        await wait_attached(scheduler)
        stream, _ = await GatewayStream.open(scheduler)
        for handle in range(4):
            await stream.submit(make_submit(handle, max_tokens=6))
        await stream.read_until_over(*range(4))
        stream.close()
    steps: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
    planned: dict[int, dict[str, int]] = {}
    replica: dict[str, int] = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "X":
            steps[event["args"]["step"]][event["name"]] = (event["ts"], event["ts"] + event["dur"])
        if event["name"] == "plan":
            planned[event["args"]["step"]] = event["args"]
        if event["name"] == "replica":
            replica = event["args"]
    assert len(steps) >= 6
    assert sum(work["num_samples"] for work in planned.values()) == 4 * 6
    assert all(work["context_tokens"] >= work["num_tokens"] > 0 for work in planned.values())
    assert replica.keys() >= {"num_blocks", "block_size", "max_num_seqs", "max_model_len", "vocab_size"}
    for step in steps.values():
        assert step.keys() >= {"plan", "send", "queue", "cache operations", "model", "sample", "apply"}
        # The file has tenths of microseconds.
        assert step["plan"][1] - 0.2 <= step["send"][0] <= step["apply"][0]
    assert sum("emit" in step for step in steps.values()) >= 6
