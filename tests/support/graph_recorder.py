"""Records decode graphs without a GPU: a replay calls the recorded function again, on the same tensors."""

from collections import Counter
from collections.abc import Callable


class CallingRecorder:
    """Counts recordings and replays."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.replays: Counter[int] = Counter()
        """Number of replays by number of the recording."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        number = self.num_recorded
        self.num_recorded += 1
        work()

        def replay() -> None:
            self.replays[number] += 1
            work()

        return replay
