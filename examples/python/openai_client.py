"""OpenAI's client against the HTTP port: a chat as it comes, a completion, and an error.

usage: python examples/python/openai_client.py [URL]
"""

import sys

from openai import BadRequestError, OpenAI


def main(url: str) -> None:
    # Any key will do where the server asks for none.
    with OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        (model,) = client.models.list()

        chunks = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            stream=True,
        )
        for chunk in chunks:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        # vLLM's additions to OpenAI's parameters are fields of extra_body.
        completion = client.completions.create(
            model=model.id, prompt="Once upon a time", max_tokens=24, temperature=0.8, seed=7, extra_body={"top_k": 20}
        )
        print(completion.choices[0].text, f"({completion.usage.completion_tokens} tokens)")

        try:
            client.completions.create(model=model.id, prompt="Once upon a time", temperature=-1)
        except BadRequestError as error:
            print(f"refused: {error.param}: {error.body['message']}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["http://127.0.0.1:8000"])
