from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.block import BlockId
from scheduler_svc.core.free_queue import FreeQueue


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["pop", "remove", "last", "first"]), st.integers(0, 7))))
def test_the_queue_behaves_like_a_list(num_blocks, operations):
    queue, model, out = FreeQueue(num_blocks), list(range(num_blocks)), []
    for operation, pick in operations:
        if operation == "pop" and model:
            count = min(1 + pick % 3, len(model))
            out += model[:count]
            del model[:count]
            assert queue.pop(count) == out[-count:]
        elif operation == "remove" and model:
            out.append(model.pop(pick % len(model)))
            queue.remove(BlockId(out[-1]))
        elif operation == "last" and out:
            model.append(out.pop(pick % len(out)))
            queue.append(BlockId(model[-1]))
        elif operation == "first" and out:
            model.insert(0, out.pop(pick % len(out)))
            queue.append_first(BlockId(model[0]))
        assert list(queue) == model
        assert len(queue) == len(model)
