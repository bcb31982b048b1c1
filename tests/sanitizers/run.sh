#!/usr/bin/env bash
# run.sh PYTHON [pytest flags]: builds the CPU library with sanitizers and runs the tests of the CPU kernels on it.
#
# SANITIZERS: the builds, each with the sanitizers that go together. ISAS: the instruction sets; the default leaves out
# those that share the code of others. The first report of a sanitizer ends the test process. Code for emulated matrix
# units: ISAS=amx_emulated CXXFLAGS="-march=native -include $PWD/tests/emulation/amx.h".
set -euo pipefail
python=$1
shift
cd "$(dirname "$0")/../.."
for sanitizers in ${SANITIZERS:-address,undefined thread}; do
  build=build/sanitizers-${sanitizers/,/-}
  cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=None -DPython_EXECUTABLE="$(realpath -s "$python")" \
    -DQUIRE_SANITIZE="$sanitizers" -DQUIRE_WARNINGS=ON -DQUIRE_ISAS="${ISAS:-avx512_bf16;avx2}" >/dev/null
  cmake --build "$build" --target quire_cpu --parallel "$(nproc)"
  # AddressSanitizer intercepts torch's C++ exceptions, which takes libstdc++ from the start.
  runtimes="$(g++ -print-file-name="lib${sanitizers:0:1}san.so") $(g++ -print-file-name=libstdc++.so.6)"
  environment=(QUIRE_TEST_CPU_LIBRARY="$PWD/$build/quire_kernels/cpu/libquire_cpu.so" ASAN_OPTIONS=detect_leaks=0
    UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1)
  if [ "$sanitizers" = thread ]; then
    g++ -std=c++20 -O1 -g -fPIC -shared -fsanitize=thread tests/sanitizers/open_mp.cpp -o "$build/libgomp_threads.so"
    environment+=(QUIRE_TEST_OPEN_MP="$PWD/$build/libgomp_threads.so")
  fi
  # Address space randomization can place a library where ThreadSanitizer keeps its own memory.
  env "${environment[@]}" LD_PRELOAD="$runtimes" setarch --addr-no-randomize "$python" -m pytest -p no:cacheprovider \
    --timeout 600 -m "" --capture=no --ignore tests/unit/kernels/cpu/test_library.py \
    tests/unit/kernels/cpu tests/unit/kernels/test_*.py "$@"
done
