#!/usr/bin/env bash
# grpcio 1.80.0: a status with details (trailing metadata) of 8 to 16 KiB arrives by chance.
#
# Expected: the status, or always the refusal, by one limit.
# Seen: below 8 KiB, headers included, each of 200 calls ends with the server's INVALID_ARGUMENT. From there on a
# share of the calls that grows with the size ends with RESOURCE_EXHAUSTED instead, made by the client; from 16 KiB on
# all. The same call is final or may be tried again, by chance. Between the limits the counts are random, so only
# their kind is compared.
. "$(dirname "$0")/prelude.sh"
install grpcio==1.80.0
cat >case.py <<'PY'
import collections
from concurrent import futures

import grpc


class Refusing(grpc.GenericRpcHandler):
    def service(self, details):
        def refuse(request, context):
            context.set_trailing_metadata((("details-bin", b"\1" * int(request)),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")

        return grpc.unary_unary_rpc_method_handler(refuse)


server = grpc.server(futures.ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((Refusing(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
call = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary("/a/b")
for size in (7_500, 10_000, 12_000, 14_000, 16_400):
    seen = collections.Counter()
    for _ in range(200):
        try:
            call(str(size).encode())
        except grpc.RpcError as error:
            seen[error.code().name] += 1
    print(size, " or ".join(sorted(seen)))
PY
run env/bin/python case.py
expect <<'TEXT'
7500 INVALID_ARGUMENT
10000 INVALID_ARGUMENT or RESOURCE_EXHAUSTED
12000 INVALID_ARGUMENT or RESOURCE_EXHAUSTED
14000 INVALID_ARGUMENT or RESOURCE_EXHAUSTED
16400 RESOURCE_EXHAUSTED
TEXT
