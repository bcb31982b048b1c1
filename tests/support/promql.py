"""Names in Prometheus's expressions, by a parser of its language."""

import promql_parser

# Grafana replaces these before Prometheus sees an expression.
_VARIABLES = {"$__rate_interval": "5m", "$__range": "5m", "$instance": ".*", "$model_name": ".*"}
_PARTS = ("expr", "lhs", "rhs", "param", "vector_selector", "args")


def metrics_in(expression: str) -> set[str]:
    """The metrics of an expression. Raises ValueError for an invalid expression."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return set(_names_in(promql_parser.parse(expression)))


def _names_in(node: object) -> list[str]:
    if isinstance(node, promql_parser.VectorSelector):
        return [node.name] if node.name else []
    parts = [getattr(node, part, None) for part in _PARTS]
    nodes = [each for part in parts for each in (part if isinstance(part, list) else [part]) if each is not None]
    return [name for each in nodes for name in _names_in(each)]
