"""Logs of a service process."""

import logging
import sys

LOG_LEVELS = ("debug", "info", "warning", "error")


def configure_logging(service: str, level: str = "info") -> None:
    """Sends the process's logs to stderr, one line a record: time, level, service, logger, message.

    Libraries that log every request stay at warnings or below, unless `level` is "debug".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s {service} %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        for noisy in ("asyncio", "httpx", "httpcore", "uvicorn.access"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        # It logs every attempt to reach a collector; quire.tracing says once that there is none.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
