"""Writes the Grafana dashboards in deploy/grafana/dashboards: `python -m tools.generate_dashboards [--check]`.

A dashboard is a row of tiles and a list of panels here; places, sizes and common fields of panels follow from that.
Expressions see the data source and the instances that are chosen at the top of the page.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboards"
_COLUMNS = 24
_WIDTH, _HEIGHT = 8, 8
_TILE_WIDTH, _TILE_HEIGHT = 4, 4
_PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
_LINKS = {
    "type": "dashboards",
    "title": "Quire",
    "tags": ["quire"],
    "asDropdown": True,
    "keepTime": True,
    "includeVars": False,
    "targetBlank": False,
    "icon": "external link",
    "tooltip": "",
}
_IN_NAMESPACE = 'namespace=~"$namespace"'
_SECONDS, _SHARE, _TOKENS_PER_S, _PER_S = "s", "percentunit", "cps", "ops"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: its series, each an expression and the name that it has in the legend."""

    title: str
    description: str
    unit: str
    series: tuple[tuple[str, str], ...]
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    """One number as it is now: green, and of another color from each of the `thresholds` on."""

    title: str
    description: str
    unit: str
    expression: str
    thresholds: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page, of the services whose metrics begin with `metric`."""

    name: str
    title: str
    metric: str
    panels: tuple[Panel, ...]
    tiles: tuple[Tile, ...] = ()


def rate(metric: str, by: str = "") -> str:
    """How fast a counter grows, over all chosen instances."""
    return f"sum{f' by ({by})' if by else ''} (rate({_chosen(metric)}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str = "") -> str:
    """A quantile of a histogram, over all chosen instances."""
    labels = ", ".join(filter(None, ["le", by]))
    grown = f"rate({_chosen(f'{histogram}_bucket')}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({labels}) ({grown}))"


def gauge(metric: str, by: str = "", how: str = "sum") -> str:
    """A gauge of all chosen instances."""
    return f"{how}{f' by ({by})' if by else ''} ({_chosen(metric)})"


def _chosen(metric: str) -> str:
    """The series of a metric, which may have label matchers, of the chosen namespaces and instances."""
    name, _, labels = metric.partition("{")
    matchers = [labels.removesuffix("}"), _IN_NAMESPACE, 'instance=~"$instance"']
    return f"{name}{{{', '.join(filter(None, matchers))}}}"


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    """The usual ones."""
    return tuple((quantile(share, histogram), f"p{round(share * 100)}") for share in (0.5, 0.9, 0.99))


def everywhere(expression: str) -> str:
    """Selects all instances: the chosen ones are of another service."""
    return expression.replace(', instance=~"$instance"', "")


GATEWAY = (
    Panel(
        "Requests by outcome",
        "Requests that ended. completed and abandoned (the client left) are not errors.",
        _PER_S,
        ((rate("quire_gateway_requests_total", "outcome"), "{{outcome}}"),),
        stacked=True,
    ),
    Panel(
        "Live requests",
        "Requests that run now, those included that wait for a replica.",
        "short",
        ((gauge("quire_gateway_live_requests", "instance"), "{{instance}}"),),
        stacked=True,
    ),
    Panel(
        "Tokens",
        "Prompt tokens that came in, tokens that were generated.",
        _TOKENS_PER_S,
        (
            (rate("quire_gateway_prompt_tokens_total"), "prompt"),
            (rate("quire_gateway_generated_tokens_total"), "generated"),
        ),
    ),
    Panel(
        "Time to first token",
        "From the arrival of a request to its first token: queue, prefill, and the way through the gateway.",
        _SECONDS,
        quantiles("quire_gateway_time_to_first_token_seconds"),
    ),
    Panel(
        "Time between tokens",
        "Between two tokens of a sequence, as they reach the gateway.",
        _SECONDS,
        quantiles("quire_gateway_inter_token_seconds"),
    ),
    Panel(
        "Time of a request",
        "Completed requests, from their arrival to the end of their call.",
        _SECONDS,
        quantiles("quire_gateway_request_seconds"),
    ),
    Panel(
        "Finish reasons",
        "Why sequences ended.",
        _PER_S,
        ((rate("quire_gateway_finished_sequences_total", "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Prompt tokens of a request",
        "Completed requests.",
        "short",
        quantiles("quire_gateway_request_prompt_tokens"),
    ),
    Panel(
        "Generated tokens of a sequence",
        "Completed requests.",
        "short",
        quantiles("quire_gateway_sequence_tokens"),
    ),
)
TENANTS = (
    Panel(
        "Requests by tenant",
        "With --tenant-metrics.",
        _PER_S,
        ((rate("quire_gateway_tenant_requests_total", "tenant"), "{{tenant}}"),),
        stacked=True,
    ),
    Panel(
        "Generated tokens by tenant",
        "Counted at the end of each request. With --tenant-metrics.",
        _TOKENS_PER_S,
        ((rate("quire_gateway_tenant_generated_tokens_total", "tenant"), "{{tenant}}"),),
        stacked=True,
    ),
    Panel(
        "Prompt tokens by tenant",
        "Counted at the end of each request. With --tenant-metrics.",
        _TOKENS_PER_S,
        ((rate("quire_gateway_tenant_prompt_tokens_total", "tenant"), "{{tenant}}"),),
        stacked=True,
    ),
    Panel(
        "p95 of the time to first token by tenant",
        "With --tenant-metrics.",
        _SECONDS,
        ((quantile(0.95, "quire_gateway_tenant_time_to_first_token_seconds", "tenant"), "{{tenant}}"),),
    ),
    Panel(
        "p95 of the time of a request by tenant",
        "With --tenant-metrics.",
        _SECONDS,
        ((quantile(0.95, "quire_gateway_tenant_request_seconds", "tenant"), "{{tenant}}"),),
    ),
    Panel(
        "Refused callers",
        "Calls that were refused for their API key, by reason.",
        _PER_S,
        ((rate("quire_gateway_refused_callers_total", "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Schedulers that a gateway reaches",
        "Fewer than there are: see the gateway's log.",
        "short",
        ((gauge("quire_gateway_connected_schedulers", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Requests sent again",
        "Since their scheduler was lost.",
        _PER_S,
        ((rate("quire_gateway_resubmissions_total", "instance"), "{{instance}}"),),
    ),
    Panel(
        "gRPC calls by status",
        "Finished calls, without health checks. CANCELLED: the client left.",
        _PER_S,
        ((rate("quire_gateway_grpc_calls_total", "code"), "{{code}}"),),
        stacked=True,
    ),
    Panel(
        "Answers over HTTP by status",
        "A stream counts when it begins.",
        _PER_S,
        ((rate("quire_gateway_http_answers_total", "status"), "{{status}}"),),
        stacked=True,
    ),
    Panel(
        "p95 of the time of an answer over HTTP",
        "By route, to the end of the answer, streams included.",
        _SECONDS,
        ((quantile(0.95, "quire_gateway_http_answer_seconds", "route"), "{{route}}"),),
    ),
    Panel(
        "Refused connections and unusable keys",
        "HTTP connections beyond --max-connections; changes of key files that could not be used.",
        _PER_S,
        (
            (rate("quire_gateway_refused_http_connections_total"), "connections"),
            (rate("quire_gateway_keys_reload_failures_total"), "key files"),
        ),
    ),
)
MEMORY = (
    Panel(
        "KV cache in use",
        "Share of the blocks that live requests hold. Cached blocks are free.",
        _SHARE,
        ((gauge("quire_scheduler_kv_cache_usage", "instance", "max"), "{{instance}}"),),
    ),
    Panel(
        "Blocks by state",
        "Cached blocks are free, and a later request may use them again. Pinned ones are among the others.",
        "short",
        ((gauge('quire_scheduler_gpu_blocks{state!="pinned"}', "state"), "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Host blocks and pinned blocks",
        "Blocks in host memory, used ones of swapped requests and cached ones; blocks that pins hold.",
        "short",
        (
            (gauge("quire_scheduler_host_blocks", "state"), "host {{state}}"),
            (gauge('quire_scheduler_gpu_blocks{state="pinned"}'), "pinned"),
        ),
    ),
    Panel(
        "Prefix cache hits",
        "Share of the prompt tokens that need not be computed.",
        _SHARE,
        (
            (
                f"{rate('quire_scheduler_prefix_cache_hits_total')}"
                f" / ({rate('quire_scheduler_prefix_cache_queries_total')} > 0)",
                "hits",
            ),
        ),
    ),
    Panel(
        "Preemptions",
        "Requests that left the batch for want of blocks: to host memory, or to be computed again.",
        _PER_S,
        (
            (rate("quire_scheduler_preemptions_total"), "all"),
            (rate("quire_scheduler_swap_outs_total"), "by swap"),
        ),
    ),
    Panel(
        "Blocks by tenant",
        "In the tables of running sequences. With --tenant-metrics.",
        "short",
        ((gauge("quire_scheduler_tenant_blocks", "tenant"), "{{tenant}}"),),
        stacked=True,
    ),
    Panel(
        "Requests by queue",
        "waiting grows where there is too little capacity.",
        "short",
        ((gauge("quire_scheduler_live_requests", "queue"), "{{queue}}"),),
        stacked=True,
    ),
    Panel(
        "Oldest waiting request",
        "How long the oldest request waits that no step had yet.",
        _SECONDS,
        ((gauge("quire_scheduler_oldest_waiting_seconds", "instance", "max"), "{{instance}}"),),
    ),
    Panel(
        "Waiting requests by tenant",
        "With --tenant-metrics.",
        "short",
        (
            (
                gauge('quire_scheduler_tenant_live_requests{queue="waiting"}', "tenant"),
                "{{tenant}}",
            ),
        ),
        stacked=True,
    ),
    Panel("Time in the queue", "Until the first step.", _SECONDS, quantiles("quire_scheduler_queue_seconds")),
    Panel(
        "Time of prefill",
        "From the first step to the first token.",
        _SECONDS,
        quantiles("quire_scheduler_prefill_seconds"),
    ),
    Panel(
        "Time of decode",
        "From the first token to the last one.",
        _SECONDS,
        quantiles("quire_scheduler_decode_seconds"),
    ),
    Panel(
        "Tokens of a step",
        "Prefill and decode together. --max-num-batched-tokens bounds them.",
        "short",
        quantiles("quire_scheduler_step_tokens"),
    ),
    Panel(
        "Sequences of a step",
        "--max-num-seqs bounds them.",
        "short",
        quantiles("quire_scheduler_step_sequences"),
    ),
    Panel(
        "Time of a step",
        "From its plan to its result, and the part that is planning.",
        _SECONDS,
        (
            *quantiles("quire_scheduler_step_seconds"),
            (quantile(0.99, "quire_scheduler_plan_seconds"), "p99 of the plan"),
        ),
    ),
    Panel(
        "Drafted tokens that were drawn",
        "Share of the drafted tokens that steps verify. With --speculate.",
        _SHARE,
        (
            (
                f"{rate('quire_scheduler_drafts_accepted_total')} / ({rate('quire_scheduler_drafts_total')} > 0)",
                "drawn",
            ),
        ),
    ),
    Panel(
        "Requests by outcome",
        "aborted: the client left, or a stop string ended the request.",
        _PER_S,
        ((rate("quire_scheduler_requests_total", "outcome"), "{{outcome}}"),),
        stacked=True,
    ),
    Panel(
        "Worker losses",
        "Losses of a worker, and requests that were found to cause them.",
        _PER_S,
        (
            (rate("quire_scheduler_worker_losses_total"), "losses"),
            (rate("quire_scheduler_requests_at_fault_total"), "requests at fault"),
        ),
    ),
    Panel(
        "Durable requests",
        "Durable ones that are kept, and requests that no gateway reads.",
        "short",
        (
            (gauge("quire_scheduler_durable_requests"), "durable"),
            (gauge("quire_scheduler_unread_requests"), "unread"),
        ),
    ),
)
WORKER = (
    Panel(
        "Time of a step by stage",
        "p50 of each stage. model grows with the batch; cache_operations with swaps and copies.",
        _SECONDS,
        ((quantile(0.5, "quire_worker_step_seconds", "stage"), "{{stage}}"),),
        stacked=True,
    ),
    Panel(
        "p99 of the time of a step by stage",
        "queue grows where steps wait for the one before.",
        _SECONDS,
        ((quantile(0.99, "quire_worker_step_seconds", "stage"), "{{stage}}"),),
    ),
    Panel(
        "Steps",
        "Steps that finished.",
        _PER_S,
        ((rate("quire_worker_steps_total", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Tokens",
        "Computed tokens, and sampled tokens.",
        _TOKENS_PER_S,
        ((rate("quire_worker_tokens_total"), "computed"), (rate("quire_worker_sampled_tokens_total"), "sampled")),
    ),
    Panel(
        "Share of the time that the device works",
        "Model and sampling, of the time that passes.",
        _SHARE,
        (
            (
                rate('quire_worker_step_seconds_sum{stage!="queue"}', "instance"),
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "Time in the current step",
        "It grows while the device hangs.",
        _SECONDS,
        ((gauge("quire_worker_device_busy_seconds", "instance", "max"), "{{instance}}"),),
    ),
    Panel(
        "Failures",
        "Rows whose logits are not finite, and steps that failed on the device.",
        _PER_S,
        (
            (rate("quire_worker_row_failures_total"), "rows"),
            (rate("quire_worker_step_failures_total"), "steps"),
        ),
    ),
    Panel(
        "Schedulers that attached",
        "More than one: a scheduler came back, or a stream broke.",
        "short",
        ((gauge("quire_worker_sessions_total", "instance", "max"), "{{instance}}"),),
    ),
    Panel(
        "Blocks",
        "Blocks of the KV pool on the device, and of the pool in host memory.",
        "short",
        ((gauge("quire_worker_kv_blocks", "where"), "{{where}}"),),
    ),
)
OVERVIEW = (
    *GATEWAY[:6],
    Panel(
        "Requests by queue",
        "At all schedulers.",
        "short",
        ((everywhere(gauge("quire_scheduler_live_requests", "queue")), "{{queue}}"),),
        stacked=True,
    ),
    Panel(
        "KV cache in use",
        "Share of each replica.",
        _SHARE,
        ((everywhere(gauge("quire_scheduler_kv_cache_usage", "instance", "max")), "{{instance}}"),),
    ),
    Panel(
        "Preemptions and worker losses",
        "At all schedulers.",
        _PER_S,
        (
            (everywhere(rate("quire_scheduler_preemptions_total")), "preemptions"),
            (everywhere(rate("quire_scheduler_worker_losses_total")), "worker losses"),
        ),
    ),
    Panel(
        "Processes that Prometheus reaches",
        "1 where it does.",
        "short",
        ((f'min by (job, instance) (up{{job=~"quire-.*", {_IN_NAMESPACE}}})', "{{job}} {{instance}}"),),
    ),
    Panel(
        "Days until a certificate expires",
        "The first one of each file.",
        "d",
        ((f"min by (file) (quire_certificate_seconds_left{{{_IN_NAMESPACE}}}) / 86400", "{{file}}"),),
    ),
    Panel(
        "Alerts",
        "That fire now.",
        "short",
        (
            (
                f'sum by (alertname) (ALERTS{{alertname=~"Quire.*", alertstate="firing", {_IN_NAMESPACE}}})',
                "{{alertname}}",
            ),
        ),
    ),
)
TILES = (
    Tile(
        "Alerts that fire",
        "The runbook says what to do.",
        "short",
        f'count(ALERTS{{alertname=~"Quire.*", alertstate="firing", {_IN_NAMESPACE}}}) or vector(0)',
        ((1, "red"),),
    ),
    Tile(
        "Processes not reached",
        "By Prometheus.",
        "short",
        f'sum(1 - up{{job=~"quire-.*", {_IN_NAMESPACE}}})',
        ((1, "red"),),
    ),
    Tile(
        "Requests that wait",
        "At all schedulers.",
        "short",
        everywhere(gauge('quire_scheduler_live_requests{queue="waiting"}')),
        ((32, "yellow"), (256, "red")),
    ),
    Tile(
        "KV cache in use",
        "Share of the fullest replica.",
        _SHARE,
        everywhere(gauge("quire_scheduler_kv_cache_usage", how="max")),
        ((0.8, "yellow"), (0.95, "red")),
    ),
    Tile(
        "Time to first token, p90",
        "From the arrival of a request to its first token.",
        _SECONDS,
        quantile(0.9, "quire_gateway_time_to_first_token_seconds"),
        ((2, "yellow"), (10, "red")),
    ),
    Tile("Generated tokens", "A second.", _TOKENS_PER_S, rate("quire_gateway_generated_tokens_total")),
)
DASHBOARDS = (
    Dashboard("overview", "Quire: overview", "quire_gateway_live_requests", OVERVIEW, TILES),
    Dashboard("memory", "Quire: memory and scheduler", "quire_scheduler_steps_total", MEMORY),
    Dashboard("gateway", "Quire: gateways and tenants", "quire_gateway_live_requests", (*GATEWAY, *TENANTS)),
    Dashboard("worker", "Quire: workers", "quire_worker_steps_total", WORKER),
)


def json_of(dashboard: Dashboard) -> dict[str, Any]:
    """A dashboard as Grafana reads it."""
    return {
        "uid": f"quire-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["quire"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [_LINKS],
        "templating": {"list": list(_variables(dashboard.metric))},
        "panels": [*_tiles(dashboard.tiles), *_panels(dashboard.panels, behind=len(dashboard.tiles))],
    }


def _variables(metric: str) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    # All matches series without the label, too, as outside of Kubernetes.
    yield _variable("namespace", f"label_values({metric}, namespace)")
    yield _variable("instance", f"label_values({metric}{{{_IN_NAMESPACE}}}, instance)")


def _variable(label: str, query: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": _PROMETHEUS,
        "query": {"query": query, "refId": f"{label}s"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _tiles(tiles: Sequence[Tile]) -> Iterator[dict[str, Any]]:
    for index, tile in enumerate(tiles):
        steps = [{"color": "green", "value": None}, *({"color": color, "value": at} for at, color in tile.thresholds)]
        yield {
            "id": index + 1,
            "type": "stat",
            "title": tile.title,
            "description": tile.description,
            "datasource": _PROMETHEUS,
            "gridPos": {"x": index * _TILE_WIDTH, "y": 0, "w": _TILE_WIDTH, "h": _TILE_HEIGHT},
            "fieldConfig": {
                "defaults": {"unit": tile.unit, "thresholds": {"mode": "absolute", "steps": steps}},
                "overrides": [],
            },
            "options": {
                "colorMode": "background" if tile.thresholds else "value",
                "graphMode": "area",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            },
            "targets": [{"refId": "A", "datasource": _PROMETHEUS, "expr": tile.expression, "legendFormat": tile.title}],
        }


def _panels(panels: Sequence[Panel], *, behind: int) -> Iterator[dict[str, Any]]:
    """The graphs, below `behind` tiles."""
    top = _TILE_HEIGHT if behind else 0
    for index, panel in enumerate(panels):
        row, column = divmod(index, _COLUMNS // _WIDTH)
        yield {
            "id": behind + index + 1,
            "type": "timeseries",
            "title": panel.title,
            "description": panel.description,
            "datasource": _PROMETHEUS,
            "gridPos": {"x": column * _WIDTH, "y": top + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
            "fieldConfig": {
                "defaults": {
                    "unit": panel.unit,
                    "min": 0,
                    "custom": {
                        "fillOpacity": 30 if panel.stacked else 0,
                        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
                    },
                },
                "overrides": [],
            },
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": [
                {"refId": chr(ord("A") + place), "datasource": _PROMETHEUS, "expr": expression, "legendFormat": legend}
                for place, (expression, legend) in enumerate(panel.series)
            ],
        }


def main() -> int:
    """Writes the files, or with --check says which are outdated; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is outdated")
    checks = parser.parse_args().check
    outdated: list[Path] = []
    for dashboard in DASHBOARDS:
        path = DIRECTORY / f"{dashboard.name}.json"
        text = json.dumps(json_of(dashboard), indent=1) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            outdated.append(path)
            if not checks:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for path in outdated:
        print(f"{path} {'is outdated: run python -m tools.generate_dashboards' if checks else 'is written'}")
    return 1 if checks and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
