#!/bin/sh -e
# Builds `client` in the folder OUT from Debian's packages: openjdk-17-jdk-headless protobuf-compiler
# protobuf-compiler-grpc-java-plugin libgrpc-java libnetty-java libprotobuf-java
# libguava-java libperfmark-java libgoogle-gson-java libgeronimo-annotation-1.3-spec-java
# With Maven or Gradle: io.grpc:grpc-netty-shaded, grpc-protobuf and grpc-stub, which bring
# com.google.rpc with them; Debian's is of 2019 and lacks ErrorInfo.
# usage: build.sh OUT
here=$(dirname "$(realpath "$0")") out=$(realpath "$1")
mkdir -p "$out/gen" "$out/classes"
protoc -I "$here/../../protos" -I "$here/.." --java_out="$out/gen" --grpc-java_out="$out/gen" \
  --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
  quire/common/v1/common.proto quire/gateway/v1/generation.proto google/rpc/error_details.proto
jars=$(printf ':/usr/share/java/%s.jar' grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite \
  grpc-stub guava failureaccess protobuf perfmark-api gson geronimo-annotation-1.3-spec \
  netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-codec-socks netty-common netty-handler \
  netty-handler-proxy netty-resolver netty-transport netty-transport-native-unix-common)
javac -encoding UTF-8 -proc:none -nowarn -Xlint:-deprecation -d "$out/classes" -cp "$jars" \
  $(find "$out/gen" -name '*.java') "$here/Client.java"
printf '#!/bin/sh\nexec java -cp %s%s Client "$@"\n' "$out/classes" "$jars" >"$out/client" && chmod +x "$out/client"
