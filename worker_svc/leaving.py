"""Ends a worker that cannot go on; whoever started it starts another."""

import logging
import os
from typing import NoReturn

_logger = logging.getLogger(__name__)


def leave_process(why: str, status: int = 1) -> NoReturn:
    """Ends this process at once: in an ordered end, a thread may wait for an operation that no longer ends."""
    _logger.critical("%s; leaving", why)
    logging.shutdown()
    os._exit(status)
