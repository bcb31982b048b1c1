#!/bin/sh -e
# Builds `client` in the folder OUT from Debian's packages: golang-go protobuf-compiler protoc-gen-go protoc-gen-go-grpc
# golang-google-protobuf-dev golang-google-grpc-dev golang-google-genproto-dev. With modules, `go get` replaces GOPATH.
# usage: build.sh OUT
here=$(dirname "$(realpath "$0")") out=$(realpath "$1")
mkdir -p "$out/src"
protoc -I "$here/../../protos" --go_out="$out/src" --go-grpc_out="$out/src" \
  quire/common/v1/common.proto quire/gateway/v1/generation.proto
cp "$here"/*.go "$out"
cd "$out" && GO111MODULE=off GOPATH="$out:/usr/share/gocode" go build -o client *.go
