"""Fair use of the event loop, which all requests share."""

import asyncio
import time

_TURN_S = 0.005
TOKENS_PER_TURN = 50
"""Tokens to detokenize between two pauses. A token takes some ten microseconds, more with stop strings."""


class Turns:
    """Lets other tasks run during long work that waits for nothing, such as a check of a thousand prompts."""

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    async def pause(self) -> None:
        """Lets other tasks run if this one has had its turn. Call it at least every few milliseconds."""
        if time.perf_counter() - self._began_at >= _TURN_S:
            await asyncio.sleep(0)
            self._began_at = time.perf_counter()
