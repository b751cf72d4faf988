"""Builds the operator library with Bazel into the package; pyproject.toml specifies the rest."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "bazel"))

import find_tensorflow  # noqa: E402  (in bazel/, where the repository rule needs it)
import library  # noqa: E402

NO_BAZEL = """tf_dynemb is built with Bazel 4.2.3, and there is no `bazel` on PATH. Install it with
  apt-get install bazel-bootstrap       (Debian 12), or
  npm install -g @bazel/bazelisk        (anywhere; fetches the version in .bazelversion),
or let tools/setup.sh do the whole set-up."""


class BazelBuild(build_ext):
    """Runs `bazel build` in place of a C compiler.

    In place, if DYNEMB_PREBUILT names a wheel (tools/setup.sh), takes the library of that instead.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.for_checkout = bool(self.inplace)  # setuptools resets inplace while it builds

    def get_ext_filename(self, fullname: str) -> str:
        """The library is not a Python module: its name has TensorFlow's version, not Python's."""
        return fullname.replace(".", "/") + f"_tf{_minor()}.so"

    def copy_extensions_to_source(self) -> None:
        """The library for drivers of CUDA 12 is none of setuptools' extensions."""
        super().copy_extensions_to_source()
        name = library.member(_minor(), cuda12=True)
        built = pathlib.Path(self.build_lib, name)
        _replace(ROOT / name, built if built.exists() else None)

    def build_extension(self, ext: Extension) -> None:
        target = pathlib.Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        cuda12 = pathlib.Path(self.build_lib, library.member(_minor(), cuda12=True))
        sources = library.sources_hash()
        wheel = os.environ.get("DYNEMB_PREBUILT", "") if self.for_checkout else ""
        if wheel:
            _take(pathlib.Path(wheel), target, cuda12)
            return
        compiled, for_cuda12 = _compiled()
        for path, built in ((target, compiled), (cuda12, for_cuda12)):
            _replace(path, built)
            if path.exists() and not self.for_checkout:
                path.with_suffix(library.STAMP).write_text(sources + "\n", encoding="utf-8")


def _minor() -> str:
    try:
        return ".".join(find_tensorflow.find()[1].split(".")[:2])
    except find_tensorflow.TensorFlowError as error:
        raise SetupError(str(error)) from None


def _replace(target: pathlib.Path, source: pathlib.Path | None) -> None:
    """Copies a library; without one, removes the earlier one.

    It is not overwritten: a process that has the old library loaded keeps it.
    """
    if source is None:
        target.unlink(missing_ok=True)
        return
    partial = target.with_suffix(".partial")
    shutil.copyfile(source, partial)
    partial.replace(target)


def _take(wheel: pathlib.Path, target: pathlib.Path, cuda12: pathlib.Path) -> None:
    """Takes the libraries that a wheel has."""
    wanted = [(target, False)]
    if library.has_cuda12(wheel, _minor()):
        wanted.append((cuda12, True))
    else:
        cuda12.unlink(missing_ok=True)
    for path, is_cuda12 in wanted:
        partial = path.with_suffix(".partial")
        try:
            library.take(wheel, _minor(), partial, is_cuda12)
        except library.LibraryError as error:
            raise SetupError(str(error)) from None
        partial.replace(path)


def _compiled() -> tuple[pathlib.Path, pathlib.Path | None]:
    """Compiles the libraries: returns their paths; None for drivers of CUDA 12 if there is none."""
    bazel = shutil.which("bazel") or shutil.which("bazelisk")
    if bazel is None:
        raise SetupError(NO_BAZEL)
    try:
        flags = find_tensorflow.bazel_flags()
        labels = [library.TARGETS[library.wants_device_code()]]
        labels += [library.CUDA12] * library.wants_cuda12()
    except (find_tensorflow.TensorFlowError, library.LibraryError) as error:
        raise SetupError(str(error)) from None
    flags += shlex.split(os.environ.get("DYNEMB_BAZEL_FLAGS", ""))
    command = [bazel, "build", *flags, *labels]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise SetupError(
            f"`{shlex.join(command)}` failed; see above. If the only errors are warnings of a "
            "compiler newer than ours, set DYNEMB_BAZEL_FLAGS=--config=no-werror."
        )
    built = [ROOT / "bazel-bin" / label.removeprefix("//").replace(":", "/") for label in labels]
    # Without nvcc or clang, it has no device code.
    cuda12 = next((path for path in built[1:] if library.has_device_code(path)), None)
    omitted = library.omitted(built[0], cuda12)
    if omitted:
        print(f"setup: {omitted}", file=sys.stderr)
    return built[0], cuda12


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3: the library does not use Python's C interface."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("tf_dynemb._dynemb_ops", sources=[])],
    cmdclass={"build_ext": BazelBuild, "bdist_wheel": PlatformWheel},
)
