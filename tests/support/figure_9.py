"""The beam search of the paper's figure 9 as a table: four beams of the prompt 1, 2."""

PROMPT = [1, 2]
WIDTH = 4
NUM_STEPS_BEFORE_THE_FORK = 6

_SPLITS = {
    # After the prompt four beams begin; the first of them splits in three at its fifth token, and the second and third
    # of those in two at their seventh.
    (1, 2): [(10, -1.0), (20, -2.0), (30, -3.0), (40, -4.0)],
    (1, 2, 10, 10, 10, 10): [(14, -0.1), (15, -0.2), (16, -0.3)],
    (1, 2, 10, 10, 10, 10, 15, 15): [(17, -0.1), (18, -0.2)],
    (1, 2, 10, 10, 10, 10, 16, 16): [(17, -0.1), (18, -0.2)],
    # What is dropped there has nothing likely left.
    (1, 2, 30, 30, 30, 30): [(30, -50.0)],
    (1, 2, 40, 40, 40, 40): [(40, -50.0)],
    (1, 2, 10, 10, 10, 10, 14, 14): [(14, -50.0)],
    (1, 2, 20, 20, 20, 20, 20, 20): [(20, -50.0)],
}


def most_likely(tokens: list[int], count: int) -> list[tuple[int, float]]:
    """Tokens that follow these and their log probabilities, best first. Where the table says nothing, a beam repeats
    its newest token."""
    chosen = _SPLITS.get(tuple(tokens), [(tokens[-1], -0.1)])
    return [*chosen, *((token_id, -100.0 - token_id) for token_id in range(count - len(chosen)))]
