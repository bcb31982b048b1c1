"""A conversation with a model whose layers keep states goes on from disk after a restart, and few states are there."""

from collections import Counter
from pathlib import Path

from tests.support.models import make_model
from tests.support.whole_engine import WholeEngine, make_request

PROMPT = [(7 * place) % 320 for place in range(100)]
BLOCK_SIZE = 4


def test_the_next_turn_continues_from_disk_and_an_answer_writes_one_checkpoint(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3.5")
    flags = [f"--model={tmp_path / 'model'}", f"--kv-disk={tmp_path}", f"--block-size={BLOCK_SIZE}", "--num-threads=1"]

    def generate(prompt: list[int], max_tokens: int) -> tuple[list[int], int, float]:
        """The output, the cached tokens of the prompt, and the number of states that were written."""
        engine, num_bytes = WholeEngine(*flags, "--num-gpu-blocks=400", "--max-num-seqs=2"), Counter[str]()
        disk, pool = engine.worker.disk, engine.worker.info.pool
        assert disk is not None
        disk.start(lambda what, count: num_bytes.update({what: count}))
        output = engine.run([make_request(1, prompt, max_tokens=max_tokens)], is_warm=True)[1, 0].token_ids
        disk.stop()
        cached = engine.usages[1].cached_tokens
        of_tokens = (len(prompt) + len(output) - 1) // BLOCK_SIZE - cached // BLOCK_SIZE
        return output, cached, (num_bytes["written"] / pool.block_bytes - of_tokens) / pool.state_blocks

    answer, cached, num_states = generate(PROMPT, 300)
    # At the end of the prompt, and after 384 tokens.
    assert (cached, num_states) == (0, 2)
    assert generate([*PROMPT, *answer, *PROMPT], 1)[1] == 384
