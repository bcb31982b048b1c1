#!/usr/bin/env bash
# grpcio 1.80.0 cancels a call of grpc.aio that nothing refers to any more; 1.85.3 lets it run to its end.
#
# Expected: a stream that was read in part and forgotten is cancelled when it is collected, as the blocking API does.
# Seen: with 1.80.0 the server's handler is cancelled; with 1.85.3 it writes on until the channel closes. `break` in
# `async for` thus leaves an endless stream behind. Way out: an object of one's own that holds the call, and cancels
# it when it goes.
. "$(dirname "$0")/prelude.sh"
cat >case.py <<'PY'
import asyncio
import gc

import grpc


class Endless(grpc.GenericRpcHandler):
    ended = ""

    def service(self, details):
        async def stream(request, context):
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                Endless.ended = "cancelled"
                raise

        return grpc.unary_stream_rpc_method_handler(stream)


async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Endless(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    async def read_one():
        async for _ in channel.unary_stream("/a/b")(b""):
            break

    await read_one()
    for _ in range(100):
        gc.collect()
        await asyncio.sleep(0.02)
        if Endless.ended:
            break
    print(grpc.__version__, Endless.ended or "still running")
    await channel.close()
    await server.stop(0)


asyncio.run(main())
PY
for version in 1.80.0 1.85.3; do
  install "grpcio==$version"
  run env/bin/python case.py
done
expect <<'TEXT'
1.80.0 cancelled
1.85.3 still running
TEXT
