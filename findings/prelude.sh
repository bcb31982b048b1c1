# Sourced by each script of this folder. Makes a temporary folder with an environment of its own, which ends with it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

# install NAME==VERSION ...: Python packages, pinned.
install() {
  [ -d env ] || "${PYTHON:-python3}" -m venv env
  env/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}

# install_npm NAME@VERSION ...: npm packages, pinned.
install_npm() {
  npm install --silent --no-audit --no-fund --ignore-scripts "$@" >/dev/null
}

# run COMMAND ...: what it prints is what `expect` compares.
run() {
  "$@" >>seen.txt 2>errors.txt || { cat errors.txt >&2; exit 1; }
}

# expect <<TEXT: fails where what was seen is something else.
expect() {
  cat >expected.txt
  diff -u expected.txt seen.txt && echo "as described"
}
