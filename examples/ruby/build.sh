#!/bin/sh -e
# Builds `client` in the folder OUT from Debian's packages: ruby ruby-grpc ruby-grpc-tools protobuf-compiler
# ruby-googleapis-common-protos-types. With gems: grpc, grpc-tools and googleapis-common-protos-types.
# usage: build.sh OUT
here=$(dirname "$(realpath "$0")") out=$(realpath "$1")
protoc -I "$here/../../protos" --ruby_out="$out" --grpc_out="$out" \
  --plugin=protoc-gen-grpc="$(command -v grpc_ruby_plugin)" \
  quire/common/v1/common.proto quire/gateway/v1/generation.proto
printf '#!/bin/sh\nexec ruby -I %s %s "$@"\n' "$out" "$here/client.rb" >"$out/client" && chmod +x "$out/client"
