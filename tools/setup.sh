#!/bin/bash
# Turns a fresh Debian or Ubuntu into a working checkout: system packages, .venv with requirements.txt, Horovod, the operator
# library, and the package installed in place. Does only what is missing, and prints one line per step.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PYTHON=${PYTHON:-python3}
readonly VENV=.venv
readonly NAME=setup LOG=build/setup.log
. tools/steps.sh

system_packages() {
  local missing=()
  command -v g++ >/dev/null || missing+=(g++)
  command -v make >/dev/null || missing+=(make)
  command -v bazel >/dev/null || command -v bazelisk >/dev/null || missing+=(bazel-bootstrap)
  [ -x "$VENV/bin/python" ] || "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  [ -d /usr/src/googletest/googletest ] || missing+=(libgtest-dev)
  [ -e /usr/include/benchmark/benchmark.h ] || missing+=(libbenchmark-dev)
  [ ${#missing[@]} -gt 0 ] || return 0

  command -v apt-get >/dev/null ||
    stop "this is not Debian or Ubuntu; install the equivalents of these packages, then run this again: ${missing[*]}"
  [ "$(id -u)" = 0 ] ||
    stop "system packages are missing, and installing them needs root. Run this, then the same command again:" \
      "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" \
      "(no bazel-bootstrap 4.2.3 in your distribution? npm install -g @bazel/bazelisk)"
  say "installing system packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  quietly apt-get update
  if [[ " ${missing[*]} " = *" bazel-bootstrap "* ]] &&
    [[ $(apt-cache policy bazel-bootstrap) != *"Candidate: 4.2.3"* ]]; then
    stop "this distribution has no bazel-bootstrap 4.2.3; bazelisk fetches it: npm install -g @bazel/bazelisk"
  fi
  quietly apt-get install -y --no-install-recommends "${missing[@]}"
  # A running server remembers the packages that it did not find.
  bazel shutdown >/dev/null 2>&1 || true
}

virtual_environment() {
  if [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
      stop "the development set-up needs Python 3.11 or newer: set PYTHON to one"
    say "creating $VENV"
    quietly "$PYTHON" -m venv "$VENV"
  fi
  if ! cmp -s requirements.txt "$VENV/requirements.installed"; then
    say "installing requirements.txt into $VENV"
    quietly "$VENV/bin/python" -m pip install -q --disable-pip-version-check -r requirements.txt
    cp requirements.txt "$VENV/requirements.installed"
  fi
}

# Plain `bazel` commands use the same Python and TensorFlow as setup.py.
bazel_settings() {
  local settings
  settings=$("$VENV/bin/python" -B bazel/find_tensorflow.py bazelrc)
  [ "$settings" = "$(cat .bazelrc.local 2>/dev/null)" ] || echo "$settings" >.bazelrc.local
}

# Bazel decides whether anything needs to be rebuilt.
library() {
  say "building the operator library if it is out of date"
  quietly "$VENV/bin/python" -B setup.py -q build_ext --inplace
}

package() {
  local stamp=$VENV/package.installed
  cat setup.py pyproject.toml tf_dynemb/_version.py | cmp -s - "$stamp" && return
  say "installing the package in place"
  quietly "$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
  cat setup.py pyproject.toml tf_dynemb/_version.py >"$stamp"
}

mkdir -p build
system_packages
virtual_environment
tools/horovod.sh install
bazel_settings
library
package
