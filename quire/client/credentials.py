"""How a client shows its API key."""

import re
from typing import Any

from quire.rpc.errors import Unauthenticated

_KEY = re.compile(r"[\x21-\x7e]{1,512}")


class KeyedChannel:
    """A channel, of either gRPC API, all of whose calls show an API key. It makes calls and nothing else.

    Not call credentials, which gRPC refuses to send where there is no TLS, also to this very machine; and not
    interceptors, which wrap each call in an object with behaviour of its own.
    """

    def __init__(self, channel: Any, api_key: str) -> None:
        """Raises Unauthenticated where no header can hold the key."""
        if not _KEY.fullmatch(api_key):
            description = "must be 1 to 512 printable ASCII characters without spaces"
            raise Unauthenticated(f"the API key {description}", reason="INVALID_API_KEY")
        self._channel = channel
        self._header = ("authorization", f"Bearer {api_key}")

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._keyed(self._channel.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._keyed(self._channel.unary_stream(method, *args, **options))

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._keyed(self._channel.stream_unary(method, *args, **options))

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._keyed(self._channel.stream_stream(method, *args, **options))

    def _keyed(self, call: Any) -> Any:
        def with_key(*args: Any, metadata: Any = None, **options: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), self._header), **options)

        return with_key


def show_key(channel: Any, api_key: str | None) -> Any:
    """The channel whose calls show the key; the channel itself where there is none. Raises as KeyedChannel does."""
    return channel if api_key is None else KeyedChannel(channel, api_key)
