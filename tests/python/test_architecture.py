"""The rules of docs/design.md about dependencies, and about the effects of an import."""

import ast
import graphlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
IN_CHECKOUT = (ROOT / "cc").is_dir() and (ROOT / "tf_dynemb").is_dir()

in_checkout = pytest.mark.skipif(not IN_CHECKOUT, reason="no sources: this tests a wheel")

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

OTHERS = ("tensorflow/", "tsl/", "xla/", "absl/", "Eigen/")
# The files that a folder may not include, by the beginning of their paths.
FORBIDDEN_INCLUDES = {
    "cc/table": (
        "tensorflow/",
        "tsl/",
        "xla/",
        "absl/",
        "Eigen/",
        "cc/device/",
        "cc/file/",
        "cc/lookup/",
        "cc/io/",
        "cc/serving/",
        "cc/tf/",
    ),
    "cc/file": (*OTHERS, "cc/device/", "cc/lookup/", "cc/serving/", "cc/tf/"),
    "cc/device": (*OTHERS, "cc/io/", "cc/serving/", "cc/serving_device/", "cc/tf/"),
    "cc/lookup": (*OTHERS, "cc/io/", "cc/serving/", "cc/tf/"),
    "cc/ranks": (
        *OTHERS,
        "cc/device/",
        "cc/file/",
        "cc/io/",
        "cc/lookup/",
        "cc/serving/",
        "cc/tf/",
    ),
    "cc/io": (*OTHERS, "cc/lookup/", "cc/serving/", "cc/tf/"),
    "cc/serving": (*OTHERS, "cc/device/", "cc/serving_device/", "cc/tf/"),
    "cc/serving_device": (*OTHERS, "cc/file/", "cc/io/", "cc/tf/"),
    "tests/cc": ("tensorflow/", "tsl/", "xla/", "cc/tf/"),
    "tests/cuda": ("tensorflow/", "tsl/", "xla/", "cc/tf/"),
    "benchmarks/cc": ("tensorflow/", "tsl/", "xla/", "cc/tf/"),
    "benchmarks/cuda": ("tensorflow/", "tsl/", "xla/", "cc/tf/"),
}


def includes(path: pathlib.Path) -> list[str]:
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


@in_checkout
@pytest.mark.parametrize("folder", FORBIDDEN_INCLUDES)
def test_cc_layers_include_only_downwards(folder):
    sources = [p for p in (ROOT / folder).rglob("*") if p.suffix in {".h", ".cc", ".cu", ".cuh"}]
    wrong = [
        f"{source.relative_to(ROOT)} includes {name}"
        for source in sources
        for name in includes(source)
        if name.startswith(FORBIDDEN_INCLUDES[folder])
    ]
    assert not wrong


@in_checkout
def test_the_include_pattern_finds_tensorflow():
    names = [name for source in (ROOT / "cc/tf").glob("*.cc") for name in includes(source)]
    assert any(name.startswith("tensorflow/") for name in names)


@in_checkout
def test_cuda_sources_do_not_include_tensorflow():
    sources = [p for p in (ROOT / "cc").rglob("*") if p.suffix in {".cu", ".cuh"}]
    assert not [p for p in sources for name in includes(p) if name.startswith("tensorflow/")]


# The second one waits by it where the C library has no other wait.
HAS_SYSTEM_TIME = {"table/system_time.cc", "tf/older_systems/symbols.cc"}


# std::condition_variable waits by the system's time with older C libraries.
@in_checkout
def test_timed_waits_and_times_of_day_do_not_depend_on_a_clock_that_is_set():
    sources = [p for p in (ROOT / "cc").rglob("*") if p.suffix in {".h", ".cc", ".cu", ".cuh"}]
    code = {
        path.name: re.sub("//.*", "", path.read_text(encoding="utf-8"))
        for path in sources
        if path.relative_to(ROOT / "cc").as_posix() not in HAS_SYSTEM_TIME
    }
    assert len(code) > 100
    reads = [name for name, text in code.items() if re.search(r"system_clock|_REALTIME", text)]
    assert reads == [], "use SystemTime"
    waits = [
        name
        for name, text in code.items()
        if "std::condition_variable" in text and re.search(r"\bwait_(for|until)\(", text)
    ]
    assert waits == [], "use MonotonicCondition"


@in_checkout
def test_few_modules_read_the_time_of_day():
    # An argument's upper limit, the time of a dump without tables, the age of a watermark, a span.
    allowed = {"tables/times.py", "tables/cut.py", "serve/metrics.py", "serve/model.py"}
    reads = {
        str(path.relative_to(ROOT / "tf_dynemb"))
        for path in package_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and re.search(r"\b(time|time_ns|now|utcnow|today)$", ast.unparse(node.func))
        and re.match(r"(time|clocks|datetime|date)\.", ast.unparse(node.func))
    }
    assert reads == allowed


def imported_modules(path: pathlib.Path) -> set[str]:
    """Returns every module that a file imports, anywhere in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def package_files() -> list[pathlib.Path]:
    return sorted((ROOT / "tf_dynemb").rglob("*.py"))


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@in_checkout
def test_only_the_communicator_imports_horovod():
    users = {
        path.name
        for path in package_files()
        for module in imported_modules(path)
        if module.split(".")[0] == "horovod"
    }
    assert users <= {"communicator.py"}


@in_checkout
def test_layers_are_on_top():
    allowed = {ROOT / "tf_dynemb/__init__.py"}
    wrong = [
        str(path.relative_to(ROOT))
        for path in package_files()
        if path not in allowed and not {"layers", "oneembedding", "tfra"} & set(path.parts)
        if any(m.startswith("tf_dynemb.layers") for m in imported_modules(path))
    ]
    assert not wrong


@in_checkout
def test_serving_needs_no_tensorflow():
    # The modules that need only numpy. They may use each other and `_version`.
    numpy_only = (
        "format",
        "storage",
        "serving",
        "chains",
        "launcher",
        "cli",
        "sok.dump",
        "__main__",
    )
    numpy_only += ("_html", "_presence")
    allowed = (*(f"tf_dynemb.{name}" for name in numpy_only), "tf_dynemb._version")
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in package_files()
        if f"{module_name(path)}.".startswith(tuple(f"tf_dynemb.{name}." for name in numpy_only))
        for module in imported_modules(path)
        if module.split(".")[0] in ("tensorflow", "keras", "horovod", "tqdm")
        or (module.startswith("tf_dynemb.") and not module.startswith(allowed))
    ]
    assert not wrong


# The modules outside the rooms that the docstring of any room may name. No room imports others.
FOR_ALL = {"_aliases", "_gpu", "_html", "_ops", "_presence", "_version", "_warn", "communicator"}
# This bound finds rooms that need a look. It is no target.
MOST_MODULES = 16  # in a folder, including `__init__`


def import_graph(package: pathlib.Path) -> dict[str, set[str]]:
    """Returns the modules that each module of a package imports, by their names inside the package.

    Imports inside functions and for type checking count, and so do strings that are the name of a
    module, as for `import_module`. An import from another folder also imports the `__init__` of
    that folder. The name of the package's `__init__` is "".
    """
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def resolve(name: str) -> str | None:
        """Returns the module that a dotted name denotes or is defined in."""
        first, *parts = name.split(".")
        if first != package.name:
            return None
        while ".".join(parts) not in modules:
            parts.pop()
        return ".".join(parts)

    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {resolve(alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are absolute"
                names |= {resolve(f"{node.module}.{alias.name}") for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                _, _, name = node.value.partition(f"{package.name}.")
                if node.value == f"{package.name}.{name}" and name in modules:
                    names.add(name)
        module_folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for name in list(names - {None, ""}):
            folder = name.rpartition(".")[0]
            if folder != module_folder:
                names.add(folder or None)
        graph[module] = names - {None, module}
    return graph


def room_of(module: str) -> str:
    """Returns the folder of a module; for a module outside the rooms, its name."""
    return module.split(".")[0]


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules of a cycle, each of which imports the one before it; [] if none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def between_rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {room_of(module): set() for module in graph}
    for module, imported in graph.items():
        rooms[room_of(module)] |= {room_of(name) for name in imported} - {room_of(module)}
    return rooms


@pytest.fixture(scope="module")
def modules():
    return import_graph(ROOT / "tf_dynemb")


@pytest.fixture(scope="module")
def rooms():
    return sorted(path.parent.name for path in (ROOT / "tf_dynemb").glob("*/__init__.py"))


@in_checkout
def test_modules_have_no_import_cycle(modules):
    assert len(modules) > 90
    assert cycle(modules) == []


@in_checkout
def test_rooms_have_no_import_cycle(modules):
    assert cycle(between_rooms(modules)) == []


@in_checkout
def test_rooms_import_only_what_their_docstrings_name(modules, rooms):
    for room, imported in between_rooms(modules).items():
        if room in rooms:
            docstring = ast.get_docstring(
                ast.parse((ROOT / "tf_dynemb" / room / "__init__.py").read_text(encoding="utf-8"))
            )
            *_, last = docstring.split("\n\n")
            names = re.fullmatch(r"May import: (nothing|(?:`\w+`(?:,\s)?)+)\.", last)
            assert names is not None, f"{room}: {last}"
            allowed = set(re.findall(r"`(\w+)`", names[1]))
            assert imported <= allowed <= {*rooms, *FOR_ALL}, room
        elif room in FOR_ALL:
            assert imported <= FOR_ALL, room


@in_checkout
def test_rooms_import_no_module_by_a_computed_name(rooms):
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in rooms
        for path in (ROOT / "tf_dynemb" / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        if ast.unparse(node.func).endswith(("import_module", "__import__"))
        if not isinstance(node.args[0], ast.Constant)
    ]
    assert not wrong


@in_checkout
def test_the_table_of_rooms_in_the_design_is_in_order(modules, rooms):
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = design.split("| room | contents |\n", 1)[1].split("\n\n", 1)[0]
    order = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(order) == rooms
    below = set(FOR_ALL)
    for room in order:
        assert between_rooms(modules)[room] <= below, room
        below.add(room)


PATH_IN_TEXT = re.compile(r"`((?:bazel|cc|examples|tests|tf_dynemb|tools)/[\w./*-]+)`")


@in_checkout
def test_the_files_that_documents_name_exist():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    names = {(p.name, n) for p in pages for n in PATH_IN_TEXT.findall(p.read_text("utf-8"))}
    assert len(names) > 50
    assert [(page, name) for page, name in sorted(names) if not any(ROOT.glob(name))] == []


@in_checkout
def test_rooms_are_small():
    folders = [path.parent for path in package_files()]
    assert {f"{f}": n for f in folders if (n := folders.count(f)) > MOST_MODULES} == {}


IMPORTS_OF_B = {
    "at the top": "from package.room import b",
    "of a name": "from package.room.b import name",
    "as a whole": "import package.room.b",
    "in a function": "def f():\n    from package.room import b",
    "for type checking": "if TYPE_CHECKING:\n    from package.room.b import Name",
    "by name": "MODULES = ('package.room.b',)",
}


@pytest.mark.parametrize("text", IMPORTS_OF_B.values(), ids=IMPORTS_OF_B)
def test_every_form_of_import_counts_in_a_cycle(tmp_path, text):
    sources = {
        "__init__": "from package import a",
        "a": text,
        "room/__init__": "",
        "room/b": "from package.room.c import name",
        "room/c": "import numpy, packages",
    }
    (tmp_path / "package" / "room").mkdir(parents=True)
    for name, source in sources.items():
        (tmp_path / "package" / f"{name}.py").write_text(source)
    graph = import_graph(tmp_path / "package")
    assert graph == {
        "": {"a"},
        "a": {"room", "room.b"},
        "room": set(),
        "room.b": {"room.c"},
        "room.c": set(),
    }
    assert cycle(graph) == []

    (tmp_path / "package" / "room" / "c.py").write_text("import package.a")
    graph = import_graph(tmp_path / "package")
    assert set(cycle(graph)) == {"a", "room.b", "room.c"}
    assert set(cycle(between_rooms(graph))) == {"a", "room"}

    (tmp_path / "package" / "room" / "c.py").write_text("from package import name")
    assert "" in cycle(import_graph(tmp_path / "package"))


@in_checkout
def test_the_tensorflow_version_is_the_same_everywhere():
    from tf_dynemb._version import TENSORFLOW_VERSION, TENSORFLOW_VERSIONS

    pin = re.compile(r"tensorflow(?:-cpu|\[and-cuda\])?==(\d+\.\d+)")
    for name in ("pyproject.toml", "requirements.txt"):
        assert set(pin.findall((ROOT / name).read_text("utf-8"))) == {TENSORFLOW_VERSION}, name
    assert TENSORFLOW_VERSIONS[-1] == TENSORFLOW_VERSION


# Imports the package into an interpreter that has already imported TensorFlow and Keras, and prints
# the effects: the values that were replaced, and the environment variables that were read.
IMPORT = """
import json, os, sys, types

import keras
import tensorflow as tf

tf.constant(1)


def attributes():
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").split(".")[0] not in ("tensorflow", "keras"):
            continue
        for name, value in list(vars(module).items()):
            # A lazily imported module replaces its placeholder.
            if not isinstance(value, types.ModuleType):
                yield (module.__name__, name), value
            if isinstance(value, type) and value.__module__ == module.__name__:
                for inner, member in list(vars(value).items()):
                    if not inner.startswith(("_abc_", "__abstract")):
                        yield (module.__name__, name, inner), member


reads = []
plain = type(os.environ).__getitem__


def recording(environ, name):
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in ("os", "_collections_abc", "collections.abc"):
        frame = frame.f_back
    reads.append((frame.f_globals.get("__name__", ""), name))
    return plain(environ, name)


type(os.environ).__getitem__ = recording
os.getenv("HOME")
assert reads == [("__main__", "HOME")], reads  # the recording works
before = dict(attributes())
assert len(before) > 10000
for stream in (sys.stdout, sys.stderr):
    print("BEFORE", file=stream, flush=True)

import tf_dynemb, tf_dynemb.layers

for stream in (sys.stdout, sys.stderr):
    print("AFTER", file=stream, flush=True)
after = dict(attributes())
print(json.dumps({
    "replaced": sorted(".".join(k) for k, value in before.items() if after.get(k) is not value),
    "environment": [read for read in reads if read[0].split(".")[0] == "tf_dynemb"],
}))
"""


@pytest.fixture(scope="module")
def imported():
    result = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result


def test_import_prints_nothing(imported):
    for text in (imported.stdout, imported.stderr):
        assert text.split("BEFORE\n", 1)[1].split("AFTER\n", 1)[0] == ""


def test_import_patches_neither_tensorflow_nor_keras(imported):
    assert json.loads(imported.stdout.splitlines()[-1])["replaced"] == []


def test_import_reads_no_environment_variables(imported):
    assert json.loads(imported.stdout.splitlines()[-1])["environment"] == []
