"""Reading a service's Prometheus metrics, as a scraper would."""

import httpx
from prometheus_client.parser import text_string_to_metric_families


async def read_metric(port: int, name: str) -> float:
    """The value of a metric without labels; KeyError if there is none of this name."""
    return (await read_metrics(port))[name]


async def read_metrics(port: int) -> dict[str, float]:
    """All values, by name, with the labels as they are scraped: `name{label="value"}`."""
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name + _labels(sample.labels): sample.value for sample in samples}


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
