"""Finds the TensorFlow that the operator library is built against.

`setup.py` and `tools/setup.sh` turn its answer into Bazel flags; the repository rule tf_configure
runs it for the details. TensorFlow is imported only for those.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_DISTRIBUTIONS = ("tensorflow-cpu", "tensorflow")


class TensorFlowError(Exception):
    """TensorFlow is missing or has another version; the message says what to install."""


def versions() -> tuple[str, list[str]]:
    """The major.minor of the development set-up, and all that this source supports.

    They are read from tf_dynemb/_version.py.
    """
    text = (_ROOT / "tf_dynemb" / "_version.py").read_text(encoding="utf-8")
    usual = re.search(r'^TENSORFLOW_VERSION = "([0-9]+\.[0-9]+)"', text, re.MULTILINE)
    supported = re.search(r"^TENSORFLOW_VERSIONS = \((.*)\)", text, re.MULTILINE)
    if not usual or not supported:
        raise TensorFlowError("tf_dynemb/_version.py does not set the versions of TensorFlow")
    return usual[1], re.findall(r"[0-9]+\.[0-9]+", supported[1])


def find() -> tuple[pathlib.Path, str]:
    """The package's folder and version, without importing it.

    Raises:
        TensorFlowError: there is none, or its version is not supported.
    """
    wanted, supported = versions()
    install = (
        f"install it with `{sys.executable} -m pip install 'tensorflow-cpu=={wanted}.*'` "
        f"(or `'tensorflow=={wanted}.*'` for GPUs)"
    )
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise TensorFlowError(
            f"tf_dynemb is built against TensorFlow {wanted}, "
            f"but {sys.executable} has none: {install}"
        )
    version = next((v for v in map(_version_of, _DISTRIBUTIONS) if v), None)
    if version is None or ".".join(version.split(".")[:2]) not in supported:
        raise TensorFlowError(
            f"tf_dynemb supports TensorFlow {', '.join(supported)}, but {sys.executable} "
            f"has {version or 'an unknown version'}: {install}"
        )
    return pathlib.Path(spec.origin).parent, version


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def bazel_flags() -> list[str]:
    """Makes Bazel use this Python and its TensorFlow, and look again when either changes.

    If TF_DYNEMB_BAZEL_CACHE names a folder, Bazel keeps what it compiles there, for other clones.
    """
    folder, version = find()
    flags = [
        f"--repo_env=PYTHON_BIN_PATH={sys.executable}",
        f"--repo_env=DYNEMB_TENSORFLOW={version}@{folder}",
    ]
    cache = os.environ.get("TF_DYNEMB_BAZEL_CACHE")
    return [*flags, f"--disk_cache={pathlib.Path(cache).absolute()}"] if cache else flags


def _details() -> dict[str, object]:
    _, version = find()
    import tensorflow as tf

    flags = tf.sysconfig.get_compile_flags()
    framework = next(f[len("-l:") :] for f in tf.sysconfig.get_link_flags() if f.startswith("-l:"))
    return {
        "include": tf.sysconfig.get_include(),
        "framework": str(pathlib.Path(tf.sysconfig.get_lib()) / framework),
        "defines": [
            *(f[len("-D") :] for f in flags if f.startswith("-D")),
            f"DYNEMB_TENSORFLOW_MINOR={version.split('.')[1]}",
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("flags", "bazelrc", "details"))
    what = parser.parse_args().what
    try:
        if what == "flags":
            print("\n".join(bazel_flags()))
        elif what == "bazelrc":
            flags = bazel_flags()
            print("\n".join(f'build "{flag}"' for flag in flags))
            if any(flag.startswith("--disk_cache") for flag in flags):
                # Tests that ran in another clone run again; with sanitizers, see .bazelrc.
                print("test --nocache_test_results")
        else:
            print(json.dumps(_details()))
    except TensorFlowError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
