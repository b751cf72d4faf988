"""The set-up: what `make` says and does, what is installed for what, and which operators are built.

Nothing is installed or compiled: copies of the scripts run with stand-ins for Bazel, pip and make.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import termios
import textwrap
import time
import types
import zipfile

import pytest
import warm_python
from example_runs import EXAMPLES, ROOT

import tf_dynemb
from tf_dynemb._version import TENSORFLOW_VERSION, __version__

pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").is_file(), reason="no sources: this tests a wheel"
)

MEMBER = f"tf_dynemb/_dynemb_ops_tf{TENSORFLOW_VERSION}.so"
MEMBER12 = f"tf_dynemb/_dynemb_ops_tf{TENSORFLOW_VERSION}_cuda12.so"
REAL = pathlib.Path(tf_dynemb.__file__).parents[1] / MEMBER
HOST, DEVICE = "//cc/tf:_dynemb_ops_host.so", "//cc/tf:_dynemb_ops.so"
CUDA12 = "//cc/tf:_dynemb_ops_cuda12.so"
RANKS = ("test",)  # the targets that start ranks


def run(command, folder=ROOT, **environment):
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TF_DYNEMB_", "DYNEMB_", "MAKE", "MFLAGS"))
    }
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**kept, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def in_front(folder):
    return os.pathsep.join([str(folder), os.environ["PATH"]])


class TestMake:
    def targets(self):
        """The targets that have a comment, and their lines."""
        text = (ROOT / "Makefile").read_text()
        return dict(re.findall(r"^([a-z-]+):[^#\n]*## (.*)$", text, re.M))

    def commands(self, target):
        done = run(["make", "-n", target])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_alone_it_prints_the_targets_and_does_nothing_else(self):
        done = run(["make"])
        assert done.returncode == 0, done.stderr
        printed = dict(re.findall(r"^make ([a-z-]+) +(.*)$", done.stdout, re.M))
        assert printed == self.targets()
        assert len(done.stdout.splitlines()) == len(printed)
        assert {"train", "test", "horovod", "develop", "build"} < printed.keys()

    def test_each_public_target_has_a_comment(self):
        text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
        (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.M)
        assert set(phony.split()) - {"run-test-cc"} == self.targets().keys()

    def test_training_needs_neither_horovod_nor_the_tools(self):
        for target in ("train", "build"):
            (setup,) = re.findall(r"tools/setup\.sh.*", self.commands(target))
            assert setup == "tools/setup.sh"
            assert "horovod" not in self.commands(target)

    @pytest.mark.parametrize("target", ["horovod", *RANKS])
    def test_what_starts_ranks_sets_up_horovod(self, target):
        assert re.search(r"tools/setup\.sh.* horovod\b", self.commands(target))

    def test_what_tests_and_measures_sets_up_its_tools(self):
        # These have their own environment, or need none.
        others = {"help", "build", "train", "horovod", "bench-hierarchical-kv", "wheels"}
        others |= {"test-wheels", "clean"}
        for target in self.targets().keys() - others:
            assert "tools/setup.sh develop" in self.commands(target), target

    def test_the_test_target_names_its_parts(self):
        parts = re.findall(r"make test: (\d of \d), ([^,]*),", self.commands("test"))
        wanted = [("1 of 3", "set-up"), ("2 of 3", "C++ tests"), ("3 of 3", "Python tests")]
        assert parts == wanted

    def test_ci_compiles_device_code_without_a_gpu(self, tmp_path):
        (tmp_path / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
        program(tmp_path / "bin" / "make", 'echo "$1 with CUDA=$TF_DYNEMB_CUDA"')
        done = run([tmp_path / ".ci" / "run"], PATH=in_front(tmp_path / "bin"), HOME=tmp_path)
        ran = re.findall(r"^(\S+) with CUDA=(\S*)$", done.stdout, re.M)
        targets = ["lint", "cuda-check", "fake-gpu", "sanitize", "test-wheel", "test"]
        assert ran == [(target, "nvcc") for target in targets]


def requirements(name):
    """The packages of a file of requirements."""
    lines = (ROOT / name).read_text().splitlines()
    return {line.split("==")[0] for line in lines if line and not line.startswith("#")}


class TestRequirements:
    def test_each_package_is_in_one_file(self):
        files = [requirements(f"requirements{name}.txt") for name in ("", "_dev", "_horovod")]
        assert sum(map(len, files)) == len(set().union(*files))

    def test_training_imports_what_is_installed_first(self):
        """Follows the imports of the quickstart through the examples; the package's are added."""
        package = (ROOT / "tf_dynemb").rglob("*.py")
        without_server = [path for path in package if path.parent.name != "serve"]
        found, left = set(), [EXAMPLES / "quickstart.py", *without_server]
        seen = set(left)
        while left:
            path = left.pop()
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [str(node.module)]
                for name in names:
                    module = name.split(".")[0]
                    local = EXAMPLES / f"{module}.py"
                    if local.exists() and local not in seen and path.parent == EXAMPLES:
                        seen.add(local)
                        left.append(local)
                    elif not local.exists():
                        found.add(module)
        found -= {*sys.stdlib_module_names, "tf_dynemb"}
        # Asked for where they are; for type checkers only; google.protobuf comes with TensorFlow.
        found -= {"horovod", "google", "tf_keras", "typing_extensions"}
        found -= {"fsspec", "prometheus_client"}  # of extras
        assert {"numpy", "matplotlib", "pyarrow", "tensorflow"} <= found
        packages = {"tensorflow": "tensorflow-cpu"}
        missing = {packages.get(name, name) for name in found} - requirements("requirements.txt")
        assert not missing

    def test_the_quickstart_runs_with_those_alone(self, tmp_path):
        names = requirements("requirements_dev.txt") | requirements("requirements_horovod.txt")
        blocked = {"horovod", "yaml", "xdist"} | {name.replace("-", "_") for name in names}
        blocked -= {"packaging"}  # TensorFlow imports it
        code = f"""
            import runpy, sys

            class Absent:
                def find_spec(name, path=None, target=None):
                    if name.split(".")[0] in {sorted(blocked)!r}:
                        raise ModuleNotFoundError(name)

            sys.meta_path.insert(0, Absent)
            sys.argv = ["quickstart.py", "--epochs", "1", "--quiet"]
            sys.path.insert(0, {str(EXAMPLES)!r})
            runpy.run_path({str(EXAMPLES / "quickstart.py")!r}, run_name="__main__")
        """
        code = textwrap.dedent(code)
        done = warm_python.run_cold(["-c", code], tmp_path, TF_CPP_MIN_LOG_LEVEL="2")
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Summary" in done.stdout


@pytest.fixture(scope="module")
def library():
    """bazel/library.py."""
    sys.path.insert(0, str(ROOT / "bazel"))
    try:
        import library
    finally:
        sys.path.remove(str(ROOT / "bazel"))
    return library


class TestDeviceCode:
    """Device code is compiled where there is a GPU, or on request."""

    @pytest.mark.parametrize(
        ("shown", "said", "wanted"),
        [
            (None, None, False),
            ("dev/nvidia0", None, True),
            ("proc/driver/nvidia/gpus/0000:01:00.0", None, True),
            ("dev/dxg", None, True),
            ("dev/nvidiactl", None, False),  # the driver without a GPU
            ("dev/nvidia0", "0", False),
            (None, "0", False),
            (None, "1", True),
            (None, "nvcc", True),
            (None, "", False),
        ],
    )
    def test_when(self, library, tmp_path, shown, said, wanted):
        if shown is not None:
            (tmp_path / shown).parent.mkdir(parents=True)
            (tmp_path / shown).touch()
        environment = {} if said is None else {"TF_DYNEMB_CUDA": said}
        assert library.wants_device_code(environment, tmp_path) is wanted

    def test_another_value_is_an_error(self, library):
        with pytest.raises(library.LibraryError, match="TF_DYNEMB_CUDA is 'yes'; set it to 0"):
            library.wants_device_code({"TF_DYNEMB_CUDA": "yes"})

    @pytest.mark.parametrize(
        ("kernels", "text"),
        [
            ("", "without device code"),
            ("13", "with device code for drivers of CUDA 13, not 12, which needs clang 19"),
            ("12 13", "with device code for drivers of CUDA 12 and 13"),
        ],
    )
    def test_the_drivers_that_a_wheel_is_for(self, library, tmp_path, kernels, text):
        wheel = tmp_path / "a.whl"
        with zipfile.ZipFile(wheel, "w") as content:
            content.writestr("tf_dynemb/a.txt", b".nv_fatbin")
            for name, version in ((MEMBER, "13"), (MEMBER12, "12")):
                content.writestr(name, b"x.nv_fatbin" if version in kernels else b"x")
        assert library.kernels_of(wheel) == set(kernels.split())
        assert library.device_code(wheel).partition(" (")[0] == text

    def test_a_user_with_a_gpu_hears_that_it_is_not_used(self, library, tmp_path, monkeypatch):
        monkeypatch.delenv("TF_DYNEMB_CUDA", raising=False)
        path = tmp_path / MEMBER
        path.parent.mkdir()
        path.write_bytes(b"no kernels")
        for there, text in ((False, ""), (True, "there is a GPU, but no nvcc")):
            monkeypatch.setattr(library, "gpu_is_there", lambda there=there: there)
            assert library.remark(tmp_path).startswith(text)
            assert bool(library.remark(tmp_path)) is there
            assert ("bazel shutdown" in library.remark(tmp_path)) is there
        path.write_bytes(b"... .nv_fatbin ...")
        assert library.remark(tmp_path) == ""


# Leaves the real library with the target's name behind it, where Bazel leaves what it builds. The
# mark of device code, which the real one may have, is taken out.
BAZEL = f"""
echo "bazel $*" >>calls.txt
mkdir -p bazel-bin/cc/tf
for name; do
  case $name in //*) ;; *) continue ;; esac
  cp {REAL} bazel-bin/cc/tf/${{name##*:}}
  LC_ALL=C sed -i 's/[.]nv_fatbin/.nv_nobody/g' bazel-bin/cc/tf/${{name##*:}}
  echo "$name ${{DEVICE_CODE:-}}" >>bazel-bin/cc/tf/${{name##*:}}
done
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what setup.py reads, with stand-ins for Bazel and for the sources."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("WORKSPACE", ".bazelrc", ".bazelversion"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "bazel", tmp_path / "bazel")
    (tmp_path / "tf_dynemb").mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy(ROOT / "tf_dynemb" / name, tmp_path / "tf_dynemb")
    (tmp_path / "cc").mkdir()
    (tmp_path / "cc" / "a.cc").write_text("int f();")
    program(tmp_path / "bin" / "bazel", BAZEL)
    return tmp_path


def setup_py(checkout, *arguments, **environment):
    python = [sys.executable, "-B", "setup.py", "-q", *arguments]
    return run(python, checkout, PATH=in_front(checkout / "bin"), **environment)


def make_wheel(checkout, **environment):
    done = setup_py(checkout, "bdist_wheel", **environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = (checkout / "dist").glob("*.whl")
    return wheel


class TestBuild:
    @pytest.mark.parametrize(
        ("said", "targets"),
        [("", [HOST]), ("0", [HOST]), ("1", [DEVICE]), ("nvcc", [DEVICE, CUDA12])],
    )
    def test_the_target(self, checkout, library, said, targets):
        if said == "" and library.gpu_is_there():
            pytest.skip("there is a GPU")
        done = setup_py(checkout, "build_ext", "--inplace", TF_DYNEMB_CUDA=said)
        assert done.returncode == 0, done.stderr
        (call,) = (checkout / "calls.txt").read_text().splitlines()
        assert [word for word in call.split() if word.startswith("//")] == targets
        assert targets[0].encode() in (checkout / MEMBER).read_bytes()[-60:]
        assert not (checkout / MEMBER12).exists()  # it has no device code
        omitted = [
            "setup: the operators have no device code: Bazel has found no nvcc; "
            "`bazel shutdown` makes it look again"
        ]
        assert re.findall("^setup: .*", done.stderr, re.M) == (omitted if said == "nvcc" else [])

    def test_without_clang_the_library_for_drivers_of_cuda_12_is_said_to_be_missing(self, checkout):
        of_nvcc = "$([[ $name = *cuda12.so ]] || echo .nv_fatbin)"
        program(checkout / "bin" / "bazel", BAZEL.replace("${DEVICE_CODE:-}", of_nvcc))
        omitted = (
            "setup: no operators for drivers of CUDA 12: Bazel has found no clang 19 "
            "(package clang-19); `bazel shutdown` makes it look again"
        )
        for said, lines in (("nvcc", [omitted]), ("1", [])):
            done = setup_py(checkout, "build_ext", "--inplace", TF_DYNEMB_CUDA=said)
            assert done.returncode == 0, done.stderr
            assert not (checkout / MEMBER12).exists()
            assert re.findall("^setup: .*", done.stderr, re.M) == lines

    def test_a_library_for_drivers_of_cuda_12(self, checkout):
        both = {"TF_DYNEMB_CUDA": "nvcc", "DEVICE_CODE": ".nv_fatbin"}
        done = setup_py(checkout, "build_ext", "--inplace", **both)
        assert done.returncode == 0, done.stderr
        assert CUDA12.encode() in (checkout / MEMBER12).read_bytes()[-60:]
        wheel = make_wheel(checkout, **both)
        with zipfile.ZipFile(wheel) as content:
            for name, target in ((MEMBER, DEVICE), (MEMBER12, CUDA12)):
                assert target.encode() in content.read(name)[-60:]
                assert content.read(f"{name.removesuffix('.so')}.sources")
        # The next library is of other sources: there is none beside it that is not.
        done = setup_py(checkout, "build_ext", "--inplace", TF_DYNEMB_CUDA="0")
        assert done.returncode == 0, done.stderr
        assert HOST.encode() in (checkout / MEMBER).read_bytes()[-60:]
        assert not (checkout / MEMBER12).exists()
        wheel.unlink()
        with zipfile.ZipFile(make_wheel(checkout, TF_DYNEMB_CUDA="0")) as content:
            assert MEMBER12 not in content.namelist()

    def test_both_targets_are_there_with_and_without_nvcc(self):
        """So that one can follow the other without compiling the host's code again."""
        text = (ROOT / "cc" / "tf" / "BUILD").read_text()
        for target in (HOST, DEVICE):
            assert f'("{target.split(":")[1]}", ":' in text
        (kinds,) = re.findall(r"for kernels in (\[[^\]]*\])([^\n]*)", text)
        assert ast.literal_eval(kinds[0]) == ["gpu_kernels", "host_kernels"]
        assert kinds[1] == ""

    def test_a_wrong_value_is_an_error(self, checkout):
        done = setup_py(checkout, "build_ext", "--inplace", TF_DYNEMB_CUDA="on")
        assert done.returncode != 0
        assert "TF_DYNEMB_CUDA is 'on'" in done.stderr


class TestPrebuiltWheel:
    """The operators of a wheel in dist/ spare the compiler if they come from the same sources."""

    def offered(self, checkout, **environment):
        """The output of bazel/library.py about the wheels in dist/."""
        python = [sys.executable, "-B", "bazel/library.py", "prebuilt"]
        done = run(python, checkout, **environment)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout.strip(), done.stderr

    def test_one_of_the_same_sources_is_taken(self, checkout):
        wheel = make_wheel(checkout)
        assert self.offered(checkout) == (str(wheel), "")
        (checkout / "calls.txt").unlink()
        done = setup_py(checkout, "build_ext", "--inplace", DYNEMB_PREBUILT=wheel)
        assert done.returncode == 0, done.stderr
        assert not (checkout / "calls.txt").exists()
        with zipfile.ZipFile(wheel) as content:
            assert (checkout / MEMBER).read_bytes() == content.read(MEMBER)
        # A wheel that is built is always compiled.
        wheel.unlink()
        make_wheel(checkout, DYNEMB_PREBUILT=wheel)
        assert (checkout / "calls.txt").exists()

    def test_python_modules_come_from_the_checkout(self, checkout):
        wheel = make_wheel(checkout)
        module = checkout / "tf_dynemb" / "__init__.py"
        module.write_text("edited = True\n")
        assert self.offered(checkout) == (str(wheel), "")
        setup_py(checkout, "build_ext", "--inplace", DYNEMB_PREBUILT=wheel)
        assert module.read_text() == "edited = True\n"

    @pytest.mark.parametrize("name", ["cc/a.cc", "cc/new.cc", "bazel/rules.bzl", ".bazelrc"])
    def test_one_of_other_sources_is_not_used(self, checkout, name):
        wheel = make_wheel(checkout)
        with (checkout / name).open("a") as file:
            file.write("\n")
        taken, remarks = self.offered(checkout)
        assert taken == ""
        assert f"dist/{wheel.name} is not used: its operators are not compiled from" in remarks

    def test_a_source_that_is_gone_counts(self, checkout):
        (checkout / "cc" / "b.cc").touch()
        make_wheel(checkout)
        (checkout / "cc" / "b.cc").rename(checkout / "cc" / "c.cc")
        assert self.offered(checkout)[0] == ""

    def test_leftovers_of_python_and_editors_do_not_count(self, checkout):
        wheel = make_wheel(checkout)
        (checkout / "bazel" / "__pycache__").mkdir(exist_ok=True)
        for name in ("bazel/__pycache__/rules.pyc", "cc/.a.cc.swp", "cc/a.cc~"):
            (checkout / name).touch()
        assert self.offered(checkout)[0] == str(wheel)

    def test_one_that_does_not_fit_is_named_with_the_reason(self, checkout):
        wheel = make_wheel(checkout)
        for environment, reason in (
            ({"TF_DYNEMB_CUDA": "1"}, "its operators have no device code"),
            ({"DYNEMB_BAZEL_FLAGS": "-s"}, "DYNEMB_BAZEL_FLAGS is set"),
        ):
            assert reason in self.offered(checkout, **environment)[1]
            assert self.offered(checkout, **environment)[0] == ""
        for name, reason in (
            (wheel.name.replace("x86_64", "riscv64"), "another kind of machine"),
            (wheel.name.replace(__version__, "0.0.9"), "another version"),
        ):
            other = wheel.rename(wheel.with_name(name))
            assert f"dist/{name} is not used: it is" in self.offered(checkout)[1]
            assert reason in self.offered(checkout)[1]
            wheel = other.rename(wheel)
        wheel.write_bytes(b"half a download")
        assert "it cannot be read" in self.offered(checkout)[1]

    def test_one_without_operators_for_this_tensorflow(self, checkout):
        wheel = make_wheel(checkout)
        with zipfile.ZipFile(wheel) as content, zipfile.ZipFile(f"{wheel}.other", "w") as other:
            for name in content.namelist():
                other.writestr(name.replace(TENSORFLOW_VERSION, "2.18"), content.read(name))
        os.replace(f"{wheel}.other", wheel)
        assert f"no operators for TensorFlow {TENSORFLOW_VERSION}" in self.offered(checkout)[1]

    def test_device_code_of_a_wheel(self, checkout):
        wheel = make_wheel(checkout, TF_DYNEMB_CUDA="1", DEVICE_CODE=".nv_fatbin")
        assert self.offered(checkout)[0] == str(wheel)
        assert self.offered(checkout, TF_DYNEMB_CUDA="1")[0] == str(wheel)
        assert "has no device code" not in self.offered(checkout, TF_DYNEMB_CUDA="0")[1]
        assert self.offered(checkout, TF_DYNEMB_CUDA="0")[0] == ""

    def test_both_libraries_of_a_wheel_are_taken(self, checkout):
        wheel = make_wheel(checkout, TF_DYNEMB_CUDA="nvcc", DEVICE_CODE=".nv_fatbin")
        done = setup_py(checkout, "build_ext", "--inplace", DYNEMB_PREBUILT=wheel)
        assert done.returncode == 0, done.stderr
        with zipfile.ZipFile(wheel) as content:
            for name in (MEMBER, MEMBER12):
                assert (checkout / name).read_bytes() == content.read(name)
        wheel = make_wheel(checkout, TF_DYNEMB_CUDA="0")
        done = setup_py(checkout, "build_ext", "--inplace", DYNEMB_PREBUILT=wheel)
        assert done.returncode == 0, done.stderr
        assert not (checkout / MEMBER12).exists()

    def test_one_that_does_not_load_leaves_the_library_as_it_was(self, checkout):
        program(checkout / "bin" / "bazel", BAZEL.replace(f"cp {REAL}", "echo 'not ELF' >"))
        wheel = make_wheel(checkout)
        (checkout / MEMBER).write_text("the old one")
        done = setup_py(checkout, "build_ext", "--inplace", DYNEMB_PREBUILT=wheel)
        assert done.returncode != 0
        assert "do not load here" in done.stderr
        assert "remove it to compile them" in done.stderr
        assert (checkout / MEMBER).read_text() == "the old one"

    def test_an_upload_has_the_hash_beside_each_library(self):
        text = (ROOT / "tools" / "wheels.sh").read_text()
        assert re.search(r'cp "\$library" "\$\{library%\.so\}\.sources"', text)
        assert "TF_DYNEMB_CUDA=${TF_DYNEMB_CUDA:-nvcc}" in text


# Notes its arguments, and does what the set-up waits for.
VENV_PYTHON = """
echo "python $*" >>calls.txt
case "$*" in
  *library.py\\ prebuilt) [ -z "${WHEEL:-}" ] || echo "$WHEEL" ;;
  *library.py\\ kind) echo CPU ;;
  *find_tensorflow.py*) echo 'build "--some=setting"' ;;
  *"pip install --progress-bar"*)
    echo "Collecting tensorflow-cpu==2.21.0"
    sleep "${PIP_TAKES:-0}"
    [ -z "${PIP_FAILS:-}" ] || { echo "no such package"; exit 1; }
    echo "pip has ended" >>calls.txt
    ;;
  *build_ext*) echo "prebuilt: $DYNEMB_PREBUILT" >>calls.txt; exit "${BUILD_FAILS:-0}" ;;
esac
"""


COMPILER = """
echo "bazel $*" >>calls.txt
echo "[12 / 34] Compiling"
trap 'echo "bazel was ended" >>calls.txt; exit 1' TERM
sleep "${BAZEL_TAKES:-0}" &
wait
"""


@pytest.fixture
def fresh(tmp_path):
    """A folder with the set-up's scripts, and stand-ins for all programs that it calls."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "tf_dynemb").mkdir()
    for name in ("setup.py", "pyproject.toml", "tf_dynemb/_version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, tmp_path)
    program(tmp_path / ".venv" / "bin" / "python", VENV_PYTHON)
    program(tmp_path / "tools" / "horovod.sh", 'echo "horovod $*" >>calls.txt')
    program(tmp_path / "bin" / "bazel", COMPILER)
    for name in ("g++", "apt-get"):
        program(tmp_path / "bin" / name, f'echo "{name} $*" >>calls.txt')
    return tmp_path


class TestSetupScript:
    def run(self, folder, *words, **environment):
        calls = folder / "calls.txt"
        calls.unlink(missing_ok=True)
        done = run(
            [folder / "tools" / "setup.sh", *words],
            folder,
            PATH=in_front(folder / "bin"),
            **environment,
        )
        text = calls.read_text() if calls.exists() else ""
        files = re.findall(r"-r (\S+)", text)
        return types.SimpleNamespace(
            rc=done.returncode,
            out=done.stdout,
            err=done.stderr,
            calls=text,
            files=files,
        )

    def test_training_installs_one_file_and_no_horovod(self, fresh):
        done = self.run(fresh)
        assert done.rc == 0, done.err
        assert done.files == ["requirements.txt"]
        assert "horovod" not in done.calls
        assert "apt-get" not in done.calls
        assert "build_ext --inplace" in done.calls
        assert "pip install -q --disable-pip-version-check --no-build-isolation" in done.calls

    def test_tools_and_horovod_follow(self, fresh):
        self.run(fresh)
        done = self.run(fresh, "develop", "horovod")
        assert done.rc == 0, done.err
        assert done.files == ["requirements_dev.txt", "requirements_horovod.txt"]
        assert "horovod install" in done.calls
        # Tests are of what is compiled here.
        assert "prebuilt: \n" in done.calls
        assert "library.py prebuilt" not in done.calls

    def test_the_second_time_little_is_left(self, fresh):
        self.run(fresh)
        done = self.run(fresh)
        assert done.rc == 0, done.err
        assert "pip" not in done.calls
        assert not done.calls.count("//cc/file")
        assert done.calls.count("build_ext") == 1  # Bazel decides

    def test_a_changed_file_of_requirements_is_installed_again(self, fresh):
        self.run(fresh)
        with (fresh / "requirements.txt").open("a") as file:
            file.write("# edited\n")
        assert self.run(fresh).files == ["requirements.txt"]

    def test_pip_runs_beside_the_compiler(self, fresh):
        done = self.run(fresh, PIP_TAKES="4")
        assert done.rc == 0, done.err
        wanted = ["-r requirements.txt", "//cc/serving", "pip has ended", "build_ext --inplace"]
        calls = done.calls.splitlines()
        found = [word for call in calls for word in wanted if word in call]
        assert found == wanted
        (first,) = (call for call in calls if "//cc/serving" in call)
        assert "cc/tf" not in first

    def test_each_part_says_what_it_does_and_how_long_it_took(self, fresh):
        done = self.run(fresh, PIP_TAKES="1")
        for part in (
            "Python packages of requirements.txt",
            "compiling what needs no TensorFlow",
            "compiling the operators",
            "installing the package in place",
        ):
            assert re.search(rf"^setup: \[0:\d\d\] {part} \.\.\.$", done.out, re.M), part
            assert re.search(rf"^setup: \[0:\d\d\] {part}: took \d+ s$", done.out, re.M), part
        assert "setup: operators for the CPU" in done.out

    def two_parts(self, folder):
        """A script that runs two parts, and prints a line of progress while they run."""
        program(
            folder / "far.sh",
            """
            set -euo pipefail
            NAME=setup LOG=log; . tools/steps.sh; . tools/parts.sh
            slow() { echo "[1,2 / 34] Compiling a.cc"; sleep 3; }
            begin pip "Packages" bash -c 'echo "Collecting numpy==1 (from x)"; sleep 3'
            begin compile "Compiling" slow
            sleep 1.5
            PRINTED=-100; progress pip compile
            finish pip; [ -z "${PROCESS[compile]:-}" ] || finish compile""",
        )
        return folder / "far.sh"

    LINE = "setup: [T] Packages, T, Collecting numpy==1; Compiling, T, step 1,2 of 34"

    def test_how_far_it_is(self, fresh):
        done = run([self.two_parts(fresh)], fresh)
        assert done.returncode == 0, done.stderr
        assert self.LINE in re.sub(r"0:\d\d", "T", done.stdout).splitlines()

    def test_a_terminal_has_one_line_that_changes(self, fresh):
        terminal, script_end = os.openpty()
        termios.tcsetwinsize(terminal, (25, 60))
        command = [self.two_parts(fresh)]
        process = subprocess.Popen(command, cwd=fresh, stdout=script_end, stderr=script_end)
        os.close(script_end)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the process has ended
            while part := os.read(terminal, 4096):
                shown += part
        os.close(terminal)
        assert process.wait() == 0
        written = shown.decode().split("\r\033[K")
        assert 50 < max(len(text) for text in written if "\n" not in text) < 60
        written = [re.sub(r"0:\d\d", "T", text) for text in written]
        assert any(text.startswith(self.LINE[:50]) for text in written)
        ended = {re.sub(r"\d+ s", "T", text.split("\r\n")[0]) for text in written}
        assert {"setup: [T] Packages: took T", "setup: [T] Compiling: took T"} <= ended

    def test_a_part_that_fails_ends_the_others(self, fresh):
        done = self.run(fresh, PIP_TAKES="2", PIP_FAILS="1", BAZEL_TAKES="60")
        assert done.rc != 0
        assert "bazel build" in done.calls
        limit = time.monotonic() + 30
        while "bazel was ended" not in (fresh / "calls.txt").read_text():
            assert time.monotonic() < limit
            time.sleep(0.1)
        assert "no such package" in done.err
        assert "build/setup/pip.log" in done.err
        assert "build_ext" not in done.calls
        assert not (fresh / ".venv" / "requirements.txt.installed").exists()

    def test_a_build_that_fails_is_shown(self, fresh):
        done = self.run(fresh, BUILD_FAILS="3")
        assert done.rc != 0
        assert "compiling the operators: failed" in done.err
        assert not (fresh / ".venv" / "package.installed").exists()

    def test_a_fitting_wheel_needs_no_compiler(self, fresh):
        done = self.run(fresh, WHEEL="/somewhere/dist/a.whl")
        assert done.rc == 0, done.err
        assert "bazel build" not in done.calls
        assert "prebuilt: /somewhere/dist/a.whl" in done.calls
        assert "not compiled, because dist/a.whl has operators of the same sources" in done.out

    def test_wrong_words(self, fresh):
        done = self.run(fresh, "everything")
        assert done.rc != 0
        assert "usage: tools/setup.sh [develop] [horovod]" in done.err


def test_the_python_that_a_caller_names_reaches_the_set_up():
    """Make exports its variables if the environment has them, with its own values."""
    show = "show:\n\t@echo $$PYTHON"
    shown = run(["make", "--no-print-directory", "--eval", show, "show"], PYTHON="python9")
    assert shown.stdout == "python9\n"
