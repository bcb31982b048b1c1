#!/bin/sh -e
# Builds `client` and `web_client` in the folder OUT with Node.js 20.11 or later, npm and protoc 3.15 or later.
# usage: build.sh OUT
here=$(dirname "$(realpath "$0")") out=$(realpath "$1")
cp "$here"/*.json "$here"/*.ts "$out"
cd "$out"
npm install --silent --no-audit --no-fund
rm -rf gen && mkdir gen
PATH="$out/node_modules/.bin:$PATH" protoc -I "$here/../../protos" -I "$here/.." \
  --es_out=gen --es_opt=target=ts,import_extension=js \
  quire/common/v1/common.proto quire/gateway/v1/generation.proto google/rpc/error_details.proto
node_modules/.bin/tsc
for client in client web_client; do
  printf '#!/bin/sh\nexec node %s/dist/%s.js "$@"\n' "$out" "$client" >"$client" && chmod +x "$client"
done
