"""Prints a chat's streamed text, as JSON, as a client library reads it: `python reader.py LIBRARY URL EXTRA_BODY`."""

import json
import sys
from collections.abc import Iterable
from typing import Any

MESSAGES: Any = [{"role": "user", "content": "hello"}]


def openai(url: str, extra: Any) -> Iterable[str]:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="-", max_retries=0)
    stream = client.chat.completions.create(model="", messages=MESSAGES, max_tokens=4, stream=True, extra_body=extra)
    return (chunk.choices[0].delta.content or "" for chunk in stream)


def langchain(url: str, extra: Any) -> Iterable[str]:
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(
        model="quire-tiny", base_url=url, api_key="-", max_retries=0, max_tokens=4, extra_body=extra
    )
    return (chunk.text for chunk in model.stream("hello"))


def litellm(url: str, extra: Any) -> Iterable[str]:
    from litellm import completion

    stream: Any = completion(
        "openai/quire-tiny", MESSAGES, api_base=url, api_key="-", max_tokens=4, stream=True, extra_body=extra
    )
    return (chunk.choices[0].delta.content or "" for chunk in stream)


def pydantic_ai(url: str, extra: Any) -> Iterable[str]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model: Any = OpenAIChatModel("quire-tiny", provider=OpenAIProvider(base_url=url, api_key="-"))
    agent: Any = Agent(model, model_settings={"max_tokens": 4, "extra_body": extra})
    return agent.run_stream_sync("hello").stream_text(delta=True)


if __name__ == "__main__":
    _, library, url, extra = sys.argv
    print(json.dumps("".join(globals()[library](url, json.loads(extra)))))
