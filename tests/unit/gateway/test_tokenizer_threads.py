"""What takes long is done in a thread, and comes out the same."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.tokenizers import byte_level, wrapped

TEXT = "the cat sat on the mat, hello world 😀 "


class CountingExecutor(ThreadPoolExecutor):
    """Counts what it is given."""

    num_submitted = 0

    def submit(self, *args, **kwargs):
        self.num_submitted += 1
        return super().submit(*args, **kwargs)


@pytest.fixture
def executor():
    with CountingExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize(("repeats", "num_threaded"), [(0, 0), (1, 0), (2000, 2)])
@pytest.mark.parametrize("include_special_tokens", [False, True])
async def test_long_texts_and_many_tokens_go_to_a_thread(executor, repeats, num_threaded, include_special_tokens):
    tokenizer = wrapped(byte_level(), executor)
    text = TEXT * repeats
    token_ids = await tokenizer.encode(text, add_special_tokens=True)
    assert token_ids == byte_level().encode(text).ids
    decoded = await tokenizer.decode_any(token_ids, include_special_tokens=include_special_tokens)
    assert decoded == ("<s>" if include_special_tokens else "") + text
    assert executor.num_submitted == num_threaded
