#!/bin/bash
# Turns a fresh Debian or Ubuntu into a working checkout. Does only what is missing, says what it does and how far it is, and keeps
# the output of each part in build/setup.
#
#   setup.sh               what training needs: .venv with requirements.txt, the operator library, the package installed in place.
#                          g++ and Bazel compile the library, unless a wheel in dist/ has it (bazel/library.py says when).
#   setup.sh develop       also what tests, lint, benchmarks and wheels need: requirements_dev.txt, GoogleTest, Google Benchmark.
#                          The library is always compiled.
#   setup.sh horovod       also Horovod, for several ranks; may follow develop
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PYTHON=${PYTHON:-python3}
readonly VENV=.venv
readonly NAME=setup LOG=build/setup.log
. tools/steps.sh
. tools/parts.sh

DEVELOP= HOROVOD=
for word in "$@"; do
  case $word in
    develop) DEVELOP=1 ;;
    horovod) HOROVOD=1 ;;
    *) stop "usage: tools/setup.sh [develop] [horovod]" ;;
  esac
done
readonly DEVELOP HOROVOD

# The packages that a user without root is asked to install at once.
missing_for_python() {
  [ -x "$VENV/bin/python" ] || "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}
missing_for_the_compiler() {
  command -v g++ >/dev/null || echo g++
  command -v make >/dev/null || echo make
  command -v bazel >/dev/null || command -v bazelisk >/dev/null || echo bazel-bootstrap
  [ -n "$DEVELOP" ] || return 0
  [ -d /usr/src/googletest/googletest ] || echo libgtest-dev
  [ -e /usr/include/benchmark/benchmark.h ] || echo libbenchmark-dev
}

UPDATED=
install_packages() {
  if [ -z "$UPDATED" ]; then apt-get update; fi
  if [[ " $* " = *" bazel-bootstrap "* ]] && [[ $(apt-cache policy bazel-bootstrap) != *"Candidate: 4.2.3"* ]]; then
    echo "this distribution has no bazel-bootstrap 4.2.3; bazelisk fetches it: npm install -g @bazel/bazelisk"
    return 1
  fi
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

# Starts the installation of system packages; on other systems, and without root, names them. The part is named `system`.
begin_packages() {
  command -v apt-get >/dev/null ||
    stop "this is not Debian or Ubuntu; install the equivalents of these packages, then run this again: $*"
  [ "$(id -u)" = 0 ] ||
    stop "system packages are missing, and installing them needs root. Run this, then the same command again:" \
      "  sudo apt-get update && sudo apt-get install -y --no-install-recommends $(echo $(missing_for_python; missing_for_the_compiler))" \
      "(no bazel-bootstrap 4.2.3 in your distribution? npm install -g @bazel/bazelisk)"
  begin system "system packages ($*)" install_packages "$@"
}

# A stamp for each file of requirements has its text.
missing_requirements() {
  local file
  for file in requirements.txt ${DEVELOP:+requirements_dev.txt} ${HOROVOD:+requirements_horovod.txt}; do
    cmp -s "$file" "$VENV/$file.installed" || echo "$file"
  done
}

install_requirements() {
  local file options=()
  for file in "$@"; do options+=(-r "$file"); done
  "$VENV/bin/python" -m pip install --progress-bar off --disable-pip-version-check "${options[@]}"
  for file in "$@"; do cp "$file" "$VENV/$file.installed"; done
}

# Plain `bazel` commands use the same Python and TensorFlow as setup.py.
bazel_settings() {
  local settings
  settings=$("$VENV/bin/python" -B bazel/find_tensorflow.py bazelrc)
  [ "$settings" = "$(cat .bazelrc.local 2>/dev/null)" ] || echo "$settings" >.bazelrc.local
}

readonly PROGRESS="--show_progress --curses=no --show_progress_rate_limit=1"

# The targets that can be compiled before TensorFlow is there, except cc/device: its two longest
# files are for the core that has nothing to do while the other parses TensorFlow's headers.
compile_first() {
  local bazel
  bazel=$(command -v bazel || command -v bazelisk)
  "$bazel" build $PROGRESS ${TF_DYNEMB_BAZEL_CACHE:+"--disk_cache=$(realpath -m "$TF_DYNEMB_BAZEL_CACHE")"} \
    ${DYNEMB_BAZEL_FLAGS:-} //cc/file //cc/serving
}

# Bazel decides whether anything needs to be rebuilt.
library() {
  DYNEMB_PREBUILT=$PREBUILT DYNEMB_BAZEL_FLAGS="${DYNEMB_BAZEL_FLAGS:-} $PROGRESS" \
    "$VENV/bin/python" -B setup.py -q build_ext --inplace
}

package_text() { cat setup.py pyproject.toml tf_dynemb/_version.py; }
install_package() {
  DYNEMB_PREBUILT=$PREBUILT "$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
  package_text >"$VENV/package.installed"
}

mkdir -p build "$LOGS"
missing=$(missing_for_python)
if [ -n "$missing" ]; then
  begin_packages $missing
  finish system
  UPDATED=1
fi
if [ ! -x "$VENV/bin/python" ]; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "the development set-up needs Python 3.11 or newer: set PYTHON to one"
  begin venv "creating $VENV" "$PYTHON" -m venv "$VENV"
  finish venv
fi

# pip waits for the network and the disk most of the time, and the compiler does not.
files=$(missing_requirements)
[ -z "$files" ] || begin pip "Python packages of $(echo $files)" install_requirements $files

PREBUILT=
if [ -z "$DEVELOP" ]; then
  PREBUILT=$("$VENV/bin/python" -B bazel/library.py prebuilt)
fi
readonly PREBUILT
if [ -n "$PREBUILT" ]; then
  say "operators: not compiled, because dist/$(basename "$PREBUILT") has operators of the same sources"
else
  missing=$(missing_for_the_compiler)
  if [ -n "$missing" ]; then
    begin_packages $missing
    finish system
    # A running server of Bazel remembers the packages that it did not find.
    bazel shutdown >/dev/null 2>&1 || true
  fi
  say "operators for the $("$VENV/bin/python" -B bazel/library.py kind)"
  if [ -n "${PROCESS[pip]:-}" ]; then
    begin first "compiling what needs no TensorFlow" compile_first
    finish first
  fi
fi
[ -z "${PROCESS[pip]:-}" ] || finish pip
[ -n "$PREBUILT" ] || bazel_settings
begin library "$([ -n "$PREBUILT" ] && echo unpacking || echo compiling) the operators" library
finish library
"$VENV/bin/python" -B bazel/library.py remark
if ! package_text | cmp -s - "$VENV/package.installed"; then
  begin package "installing the package in place" install_package
  finish package
fi
if [ -n "$HOROVOD" ]; then
  begin horovod "Horovod, compiled once for all checkouts" tools/horovod.sh install
  finish horovod
fi
