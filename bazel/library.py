"""Decides which operator library a checkout gets: with device code or without, and from where.

`setup.py` and `tools/setup.sh` ask. Neither TensorFlow nor a package outside Python is needed.

Device code takes nvcc minutes, and is of no use without a GPU. It is compiled if this machine has
a GPU and nvcc, unless TF_DYNEMB_CUDA in the environment says otherwise:

  0       never
  1       always; a missing nvcc is an error
  nvcc    if nvcc is found, with or without a GPU; and a second library for drivers of CUDA 12, if
          clang is found, too

A library that a wheel in dist/ brings spares the compiler if it is the one that compiling would
give: of this version, for this TensorFlow and this machine, from the same C++ sources. The wheel's
Python modules are never used.
"""

import argparse
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping

import find_tensorflow

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGETS = {False: "//cc/tf:_dynemb_ops_host.so", True: "//cc/tf:_dynemb_ops.so"}
CUDA12 = "//cc/tf:_dynemb_ops_cuda12.so"
CLANG = "clang 19 (package clang-19)"
LOOK_AGAIN = "`bazel shutdown` makes it look again"  # it remembers what it has found

# A file beside the library of a wheel, with the hash of the sources that it was compiled from.
STAMP = ".sources"

# The sources and the compiler of the library.
_SOURCES = ("cc", "bazel", "WORKSPACE", ".bazelrc", ".bazelversion")

# The section of an ELF file that has the kernels.
_DEVICE_CODE = b".nv_fatbin"


class LibraryError(Exception):
    """A variable of the environment or a wheel is not usable; the message says what to do."""


def gpu_is_there(root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Whether NVIDIA's driver, or that of WSL, shows a GPU."""
    shown = [*root.glob("dev/nvidia[0-9]*"), *root.glob("proc/driver/nvidia/gpus/*")]
    return bool(shown) or (root / "dev/dxg").exists()


def wants_device_code(
    environ: Mapping[str, str] = os.environ, root: pathlib.Path = pathlib.Path("/")
) -> bool:
    """Whether device code is compiled, as far as it can be: see the module's docstring.

    Raises:
        LibraryError: TF_DYNEMB_CUDA has another value.
    """
    said = environ.get("TF_DYNEMB_CUDA", "")
    if said not in ("", "0", "1", "nvcc"):
        raise LibraryError(
            f"TF_DYNEMB_CUDA is {said!r}; set it to 0 (no device code), 1 (device code, with or "
            "without a GPU) or nvcc (if nvcc is found), or unset it (if there is a GPU)"
        )
    return gpu_is_there(root) if said == "" else said != "0"


def wants_cuda12(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a library for drivers of CUDA 12 is compiled, too, as far as it can be."""
    return environ.get("TF_DYNEMB_CUDA") == "nvcc"


def has_device_code(library: pathlib.Path) -> bool:
    """Whether a library has kernels for a GPU."""
    return _DEVICE_CODE in library.read_bytes()


def omitted(
    compiled: pathlib.Path, cuda12: pathlib.Path | None, environ: Mapping[str, str] = os.environ
) -> str:
    """Says what was to be compiled if nvcc and clang were found, and was not, or ""."""
    if not wants_cuda12(environ) or cuda12 is not None:
        return ""
    what, compiler = "no operators for drivers of CUDA 12", CLANG
    if not has_device_code(compiled):
        what, compiler = "the operators have no device code", "nvcc"
    return f"{what}: Bazel has found no {compiler}; {LOOK_AGAIN}"


def sources_hash(root: pathlib.Path = ROOT) -> str:
    """The hash of all that the library is compiled from in this checkout."""
    total = hashlib.sha256()
    for path in _source_files(root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return total.hexdigest()


def _source_files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    for name in _SOURCES:
        top = root / name
        if top.is_file():
            yield top
            continue
        for path in sorted(top.rglob("*")):
            inside = path.relative_to(top)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
            if path.is_file() and not hidden and not path.name.endswith("~"):
                yield path


def member(minor: str, cuda12: bool = False) -> str:
    """The name in a wheel of the library for a TensorFlow, such as "2.21", and for a driver."""
    return f"tf_dynemb/_dynemb_ops_tf{minor}{'_cuda12' * cuda12}.so"


def why_not(wheel: pathlib.Path, root: pathlib.Path = ROOT, device: bool | None = None) -> str:
    """Returns why a wheel's library cannot take the place of a compiled one, or "" if it can."""
    version = re.search(
        r'^__version__ = "(.*)"', (root / "tf_dynemb" / "_version.py").read_text("utf-8"), re.M
    )
    if version is None or wheel.name.split("-")[1] != version[1]:
        return "it is of another version"
    name = member(_minor())
    with zipfile.ZipFile(wheel) as content:
        if name not in content.namelist():
            return f"it has no operators for TensorFlow {_minor()}"
        stamp = name.removesuffix(".so") + STAMP
        sources = content.read(stamp).decode() if stamp in content.namelist() else ""
        if sources.strip() != sources_hash(root):
            return "its operators are not compiled from the sources that are here"
        kernels = _DEVICE_CODE in content.read(name)
    if (wants_device_code() if device is None else device) and not kernels:
        return "its operators have no device code"
    if kernels and os.environ.get("TF_DYNEMB_CUDA") == "0":
        return "its operators have device code, and TF_DYNEMB_CUDA is 0"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += ["--dry-run", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        return "it is for another kind of machine, or for another Python"
    return ""


def _minor() -> str:
    """The installed TensorFlow's major.minor, or that of the development set-up."""
    try:
        version = find_tensorflow.find()[1]
    except find_tensorflow.TensorFlowError:
        return find_tensorflow.versions()[0]
    return ".".join(version.split(".")[:2])


def prebuilt(root: pathlib.Path = ROOT) -> tuple[pathlib.Path | None, list[str]]:
    """Returns the wheel of dist/ that spares the compiler, if there is one, and remarks on others.

    Raises:
        LibraryError: TF_DYNEMB_CUDA has a value that it cannot have.
    """
    wants_device_code()
    remarks = []
    for wheel in sorted((root / "dist").glob("tf_dynemb-*.whl")):
        reason = "DYNEMB_BAZEL_FLAGS is set" if os.environ.get("DYNEMB_BAZEL_FLAGS") else ""
        try:
            reason = reason or why_not(wheel, root)
        except (zipfile.BadZipFile, OSError, IndexError) as error:
            reason = f"it cannot be read ({error})"
        if not reason:
            return wheel, remarks
        remarks.append(f"dist/{wheel.name} is not used: {reason}")
    return None, remarks


def has_cuda12(wheel: pathlib.Path, minor: str) -> bool:
    """Whether a wheel has a library for a TensorFlow and drivers of CUDA 12."""
    with zipfile.ZipFile(wheel) as content:
        return member(minor, cuda12=True) in content.namelist()


def kernels_of(wheel: pathlib.Path) -> set[str]:
    """Returns "12" and "13", if a wheel has kernels for drivers of these versions of CUDA."""
    with zipfile.ZipFile(wheel) as content:
        return {
            "12" if name.endswith("_cuda12.so") else "13"
            for name in content.namelist()
            if name.endswith(".so") and _DEVICE_CODE in content.read(name)
        }


def device_code(wheel: pathlib.Path) -> str:
    """Returns a text about the drivers that a wheel has kernels for."""
    kernels = kernels_of(wheel)
    if not kernels:
        return "without device code"
    text = f"with device code for drivers of CUDA {' and '.join(sorted(kernels))}"
    return text if "12" in kernels else f"{text}, not 12, which needs {CLANG}"


def take(wheel: pathlib.Path, minor: str, target: pathlib.Path, cuda12: bool = False) -> None:
    """Writes a wheel's library for a TensorFlow to `target`, and sees that it loads here.

    Raises:
        LibraryError: the wheel has no such library, or it does not load.
    """
    with zipfile.ZipFile(wheel) as content:
        try:
            target.write_bytes(content.read(member(minor, cuda12)))
        except KeyError:
            raise LibraryError(
                f"{wheel} has no operators for TensorFlow {minor}; remove it to compile them"
            ) from None
    framework = find_tensorflow.find()[0] / "libtensorflow_framework.so.2"
    load = "import ctypes, sys\nfor path in sys.argv[1:]: ctypes.CDLL(path, ctypes.RTLD_GLOBAL)"
    loading = [sys.executable, "-c", load, str(framework), str(target.absolute())]
    done = subprocess.run(loading, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.splitlines() or ["no output"])[-1]
        raise LibraryError(
            f"the operators of {wheel} do not load here ({last}); remove it to compile them"
        )


def kind() -> str:
    """Says which library is compiled, and how to get the other."""
    said = os.environ.get("TF_DYNEMB_CUDA", "")
    if wants_device_code():
        why = f"TF_DYNEMB_CUDA is {said}" if said else "there is a GPU"
        return f"CPU and, if nvcc is found, for GPUs: {why}"
    if said:
        return "CPU: TF_DYNEMB_CUDA is 0"
    return "CPU: there is no GPU; TF_DYNEMB_CUDA=1 adds device code all the same"


def remark(root: pathlib.Path = ROOT) -> str:
    """The notice about the installed library for the user of a machine with a GPU, or ""."""
    path = root / member(_minor())
    if not gpu_is_there() or has_device_code(path) or os.environ.get("TF_DYNEMB_CUDA") == "0":
        return ""
    return (
        "there is a GPU, but no nvcc, so the operators have no device code, and tables are in host "
        "memory; install CUDA's nvcc 13, or set NVCC to it, then run `bazel shutdown`, and this "
        "again"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prebuilt", "kind", "remark", "device-code"))
    parser.add_argument("wheel", nargs="?", type=pathlib.Path, help="for device-code")
    given = parser.parse_args()
    what = given.what
    if (what == "device-code") != (given.wheel is not None):
        parser.error("device-code needs a wheel, and the others take none")
    try:
        if what == "prebuilt":
            wheel, remarks = prebuilt()
            for text in remarks:
                print(f"setup: {text}", file=sys.stderr)
            if wheel is not None:
                print(wheel)
        elif what == "kind":
            print(kind())
        elif what == "device-code":
            print(device_code(given.wheel))
        elif remark():
            print(f"setup: {remark()}")
    except LibraryError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
