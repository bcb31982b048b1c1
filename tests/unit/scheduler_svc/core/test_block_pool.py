from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.block_pool import BlockId, FreeQueue


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
            taken = [model.pop(pick % len(model)) for _ in range(min(1 + pick % 3, len(model)))]
            queue.remove([BlockId(block) for block in taken])
            out += taken
        elif operation == "last" and out:
            count = min(1 + pick % 3, len(out))
            model += out[:count]
            del out[:count]
            queue.extend([BlockId(block) for block in model[-count:]])
        elif operation == "first" and out:
            count = min(1 + pick % 3, len(out))
            queue.extend_first([BlockId(block) for block in out[:count]])
            model[:0] = out[:count][::-1]
            del out[:count]
        assert list(queue) == model
        assert len(queue) == len(model)
