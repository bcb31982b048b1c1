"""Quire's own client, blocking: a whole answer, a chat as it comes, several samples, and an error.

usage: python examples/python/sync_client.py [HOST:PORT]
"""

import sys

from quire.client import ChatMessage, Client, GenerationOptions
from quire.rpc.errors import InvalidArgument


def main(address: str) -> None:
    with Client(address) as client:
        story = client.generate("Once upon a time", GenerationOptions(max_tokens=40, temperature=0), timeout_s=60)
        print(f"Once upon a time{story.text}")
        print(f"({story.usage.generated_tokens} tokens, {story.sequences[0].finish_reason})\n")

        question = [ChatMessage("user", "What is the capital of France?")]
        with client.chat_stream(question, GenerationOptions(temperature=0)) as stream:
            for piece in stream.text:
                print(piece, end="", flush=True)
        print("\n")

        for sample in client.generate(
            "The fox", GenerationOptions(max_tokens=12, temperature=1, n=3, seed=1)
        ).sequences:
            print(f"{sample.index}: The fox{sample.text}")

        try:
            client.generate("Once upon a time", GenerationOptions(temperature=-1))
        except InvalidArgument as error:
            for violation in error.violations:
                print(f"\nrefused: {violation.field} {violation.description}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
