"""Prints vectors and ranks, as JSON, as client libraries read them: `python vectors.py URL RANKING_URL`."""

import json
import sys
from typing import Any

TEXTS = ["the cat", "a dog"]
QUERY, DOCUMENTS = "cat", ["the", "a dog", "small blue hat"]


def langchain(url: str, ranking_url: str) -> Any:
    from langchain_openai import OpenAIEmbeddings

    # Else it sends the token ids of a model of OpenAI, for which it downloads a vocabulary.
    model: Any = OpenAIEmbeddings(
        model="tiny", base_url=f"{url}/v1", api_key="-", max_retries=0, check_embedding_ctx_length=False
    )
    return {"vectors": model.embed_documents(TEXTS)}


def haystack(url: str, ranking_url: str) -> Any:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.utils import Secret

    key = Secret.from_token("-")
    model: Any = OpenAIDocumentEmbedder(model="tiny", api_base_url=f"{url}/v1", api_key=key, progress_bar=False)
    documents = model.run([Document(content=text) for text in TEXTS])["documents"]
    return {"vectors": [each.embedding for each in documents]}


def litellm(url: str, ranking_url: str) -> Any:
    from litellm import embedding, rerank

    vectors: Any = embedding("openai/tiny", TEXTS, api_base=f"{url}/v1", api_key="-")
    found = {"vectors": [each["embedding"] for each in vectors.data]}
    for provider, base in (
        ("cohere", ranking_url),
        ("jina_ai", f"{ranking_url}/v1/rerank"),
        ("hosted_vllm", ranking_url),
    ):
        ranks: Any = rerank(f"{provider}/ranker", query=QUERY, documents=DOCUMENTS, top_n=2, api_base=base, api_key="-")
        found[provider] = [[each["index"], each["relevance_score"]] for each in ranks.results]
    return found


def cohere(url: str, ranking_url: str) -> Any:
    from cohere import ClientV2  # pyrefly: ignore

    ranks: Any = ClientV2(api_key="-", base_url=ranking_url).rerank(
        model="ranker", query=QUERY, documents=DOCUMENTS, top_n=2
    )
    types: Any = ["float", "int8", "ubinary"]
    embedded: Any = ClientV2(api_key="-", base_url=url).embed(
        model="tiny", texts=TEXTS, input_type="search_document", embedding_types=types, truncate="START"
    )
    found = embedded.embeddings
    return {
        "cohere": [[each.index, each.relevance_score] for each in ranks.results],
        "vectors": found.float_,
        "sizes": [len(found.int8[0]), len(found.ubinary[0])],
        "billed": [embedded.meta.billed_units.input_tokens, ranks.meta.billed_units.search_units],
    }


if __name__ == "__main__":
    print(json.dumps({each.__name__: each(*sys.argv[1:]) for each in (langchain, haystack, litellm, cohere)}))
