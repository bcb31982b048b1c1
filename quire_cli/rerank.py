"""`quire rerank`: documents in the order in which they fit a query."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from quire.client import Client
from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire_cli.flags import ModelFlags, read_lines

PROGRAM = "quire rerank"


@dataclass(frozen=True, slots=True)
class RerankFlags(ModelFlags):
    """Prints documents in the order in which they fit a query, best first, each after its score."""

    query: str | None = setting(None, "the query", positional=True)
    documents: str = setting("-", "the documents, one per line; - is stdin", metavar="FILE")
    top_n: int | None = setting(None, "maximum number of documents to print", minimum=1)
    truncate: bool = setting(False, "cut documents that are too long instead of refusing them")
    format: str = setting("text", "how to print documents", choices=("text", "json"))


def main(argv: Sequence[str]) -> int:
    """Prints the documents; returns 0."""
    flags = load_settings(RerankFlags, argv, os.environ, program=PROGRAM)
    if not flags.query:
        raise ConfigurationError("no query; give one as argument")
    documents = read_lines(flags.documents)
    with Client(flags.address, api_key=flags.api_key, tls=flags.client_tls()) as client:
        ranking = client.rerank(
            flags.query, documents, top_n=flags.top_n, truncate=flags.truncate or None, model=flags.model
        )
    for each in ranking.results:
        document = documents[each.index]
        if flags.format == "text":
            print(f"{each.relevance_score:.6f}\t{document}")
        else:
            values = {"index": each.index, "relevance_score": each.relevance_score, "document": document}
            print(json.dumps(values, ensure_ascii=False))
    return 0
