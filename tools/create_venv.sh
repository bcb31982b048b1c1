#!/bin/sh
# Creates the virtual environment DIR with the interpreter PYTHON, with pip, and with uv where there is a build of it.
# usage: create_venv.sh PYTHON DIR
set -eu

python=$1
directory=$2

if [ -z "$python" ]; then
  echo "setup: error: no Python 3.11 or later was found;" \
    "install one, or name it: make setup PYTHON=/path/to/python3.11" >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup: error: $python is $("$python" --version 2>&1); Quire needs 3.11 or later" \
    "(make setup PYTHON=/path/to/python3.11)" >&2
  exit 1
fi

echo "setup: creating $directory with $("$python" --version 2>&1)"
export PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
# The interpreter's own pip (22.3 or later) is quicker than ensurepip, which some distributions leave out.
if "$python" -c 'import venv, pip' 2>/dev/null && "$python" -m venv --without-pip "$directory" &&
  "$python" -m pip --python "$directory/bin/python" install --quiet --no-compile --only-binary uv pip uv; then
  exit 0
elif "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  "$python" -m venv "$directory"
else
  echo "setup: error: $python has no venv module, or neither pip nor ensurepip; install them" \
    "(on Debian: apt-get install python3-venv)" >&2
  exit 1
fi
"$directory/bin/python" -m pip install --quiet --no-compile --no-deps --only-binary :all: uv ||
  echo "setup: uv cannot be installed here; pip does its work, slower"
