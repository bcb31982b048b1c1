#!/bin/sh -e
# Builds `client` in the folder OUT from Debian's packages: cargo protobuf-compiler librust-prost-dev
# librust-prost-build-dev librust-prost-types-dev librust-h2-dev librust-tokio-dev librust-base64-dev
# usage: build.sh OUT
here=$(dirname "$(realpath "$0")") out=$(realpath "$1")
mkdir -p "$out/src" "$out/.cargo"
cp "$here/Cargo.toml" "$here/build.rs" "$out" && cp "$here/src/main.rs" "$out/src"
cat >"$out/.cargo/config.toml" <<'END'
[source.crates-io]
replace-with = "debian"
[source.debian]
directory = "/usr/share/cargo/registry"
END
cd "$out" && QUIRE_PROTOS="$here/../../protos" /usr/bin/cargo build --quiet --offline --release
cp target/release/client client
