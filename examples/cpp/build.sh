#!/bin/sh -e
# Builds `client` in the folder OUT from Debian's packages: g++ pkg-config protobuf-compiler protobuf-compiler-grpc
# libgrpc++-dev libprotobuf-dev
# usage: build.sh OUT
here=$(dirname "$(realpath "$0")") out=$(realpath "$1")
protoc -I "$here/../../protos" -I "$here/.." --cpp_out="$out" --grpc_out="$out" \
  --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" \
  quire/common/v1/common.proto quire/gateway/v1/generation.proto google/rpc/error_details.proto
cd "$out"
g++ -std=c++17 -O1 -I . -o client "$here/client.cc" quire/common/v1/common.pb.cc quire/gateway/v1/generation.pb.cc \
  quire/gateway/v1/generation.grpc.pb.cc google/rpc/error_details.pb.cc $(pkg-config --cflags --libs grpc++ protobuf)
