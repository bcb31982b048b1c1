#!/usr/bin/env bash
# grpcio 1.82.3 and 1.85.3: a name in GRPC_EXPERIMENTS that another version knew is an error that nothing silences.
#
# Expected: an experiment that became the rule is ignored, or GRPC_VERBOSITY=NONE, which promises no logs, hides it.
# Seen: `event_engine_poller_for_python` is a choice up to 1.82 and unknown from 1.83 on. Then each process that makes a
# server writes two lines to stderr, one of them an error, also with GRPC_VERBOSITY=NONE. The server starts as before.
# So a program that sets the variable for its own processes has to look at the version first.
. "$(dirname "$0")/prelude.sh"
cat >case.py <<'PY'
from concurrent import futures

import grpc

server = grpc.server(futures.ThreadPoolExecutor(1))
server.add_insecure_port("127.0.0.1:0")
server.start()
server.stop(None).wait()
PY
for version in 1.82.3 1.85.3; do
  install grpcio==$version
  for verbosity in ERROR NONE; do
    echo "$version, GRPC_VERBOSITY=$verbosity" >>seen.txt
    GRPC_VERBOSITY=$verbosity GRPC_EXPERIMENTS=-event_engine_poller_for_python env/bin/python case.py 2>&1 |
      grep -o "Unknown experiment: .*" >>seen.txt || true
  done
done
expect <<'TEXT'
1.82.3, GRPC_VERBOSITY=ERROR
1.82.3, GRPC_VERBOSITY=NONE
1.85.3, GRPC_VERBOSITY=ERROR
Unknown experiment: event_engine_poller_for_python
1.85.3, GRPC_VERBOSITY=NONE
Unknown experiment: event_engine_poller_for_python
TEXT
