"""`import tf_dynemb` imports TensorFlow only when it is needed."""

from __future__ import annotations

import ast
import itertools
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from chain_writer import Change, Row, publish

import tf_dynemb as de
from tf_dynemb import _registration


def python(code: str, *arguments: object, path: pathlib.Path | None = None) -> str:
    """Runs `code` in a fresh Python and returns its output; fails with its errors."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_serving_needs_no_tensorflow(tmp_path):
    held = {"t": Change({7: Row(np.array([1, 2, 3], np.float32))})}
    publish(tmp_path, "base", held, watermark=1)
    out = python(
        """
        import sys

        for name in ("tensorflow", "keras", "pandas", "pyarrow"):
            sys.modules[name] = None
        import tf_dynemb as de
        import tf_dynemb.serving, tf_dynemb.storage

        assert de.serving is tf_dynemb.serving and de.storage.Chain
        print(de.serving.Reader(sys.argv[1]).lookup([[7]]).tolist())
        for name in ("DynamicVariable", "layers", "lookup_sparse"):
            try:
                getattr(de, name)
            except ImportError as error:
                assert "tensorflow-cpu==2.21" in str(error), error
            else:
                raise AssertionError(name)
        """,
        tmp_path,
    )
    assert out == "[[[1.0, 2.0, 3.0]]]\n"


def test_import_loads_no_heavy_module():
    out = python(
        """
        import sys
        import tf_dynemb as de

        dir(de), de.__all__, de.__version__, hasattr(de, "frob")
        heavy = {"tensorflow", "keras", "numpy", "tf_dynemb.layers", "tf_dynemb.serving"}
        print(heavy & set(sys.modules))
        de.serving.Reader
        print(heavy & set(sys.modules) - {"numpy", "tf_dynemb.serving"})
        """
    )
    assert out == "set()\nset()\n"


def type_checked_names() -> set[str]:
    """Returns the names that editors and mypy see."""
    tree = ast.parse(pathlib.Path(de.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {alias.name for node in block.body for alias in node.names}


def test_lists_of_names_agree():
    assert type_checked_names() == set(de._HOMES)
    assert set(de.__all__) == {*de._HOMES, "__version__"}
    assert set(de.__all__) <= set(dir(de))
    assert sorted(dir(de)) == dir(de)


def test_unknown_names():
    assert not hasattr(de, "frob")
    with pytest.raises(AttributeError, match="'tf_dynemb' has no attribute 'frob'"):
        de.frob  # noqa: B018
    with pytest.raises(ImportError, match="frob"):
        from tf_dynemb import frob  # noqa: F401


def test_names_are_objects_of_their_modules():
    from tf_dynemb import OptimizerWrapper, layers
    from tf_dynemb.optimizers import wrapper

    assert OptimizerWrapper is wrapper.OptimizerWrapper is de.OptimizerWrapper
    assert de.layers is layers is sys.modules["tf_dynemb.layers"]
    assert vars(de)["OptimizerWrapper"] is OptimizerWrapper  # cached


def test_star_import():
    names: dict[str, object] = {}
    exec("from tf_dynemb import *", names)
    assert set(de.__all__) <= set(names)


# Stand-ins that import each other as Keras and TensorFlow do, and classes that need both loaded.
STAND_INS = {
    "tensorflow": "import sys\nimport {0}keras\nwhole = True\n",
    "keras": "import {0}tensorflow\nfrom types import SimpleNamespace as N\n"
    "config = N(backend=lambda: {1!r})\nwhole = True\n",
    "classes": "import keras as k, tensorflow as t\nassert k.whole and t.whole\nprint('known')\n",
}


def stand_ins(path: pathlib.Path, backend: str = "tensorflow") -> pathlib.Path:
    for name, text in STAND_INS.items():
        source = text.format("", backend)
        if backend != "tensorflow":
            source = source.replace("import tensorflow\n", "")
        (path / f"{name}.py").write_text(source)
    return path


@pytest.mark.parametrize(
    "order", [*itertools.permutations(["tf_dynemb", "keras", "tensorflow"])], ids="-".join
)
def test_classes_are_registered_when_keras_and_tensorflow_are_loaded(tmp_path, order):
    lines = [f"import {name}; print({name!r})" for name in order]
    code = f"""
import importlib, sys
plain = importlib.import_module
importlib.import_module = lambda name: plain(
    "classes" if name == "tf_dynemb.layers" else "json" if name.startswith("tf_dynemb.") else name
)
before = list(sys.meta_path)
{chr(10).join(lines)}
print(sys.meta_path == before)
print(type(keras.__loader__).__name__, vars(keras.__loader__).keys() == {{"name", "path"}})
"""
    out = python(code, path=stand_ins(tmp_path)).splitlines()
    assert out.count("known") == 1
    # Keras and TensorFlow import each other.
    last = max(order.index("tf_dynemb"), min(order.index("keras"), order.index("tensorflow")))
    assert out[: last + 2] == [*order[:last], "known", order[last]]
    assert out[-2:] == ["True", "SourceFileLoader True"]


def test_keras_with_another_backend_registers_nothing(tmp_path):
    code = "import tf_dynemb, keras, tensorflow, sys; print('tf_dynemb.layers' in sys.modules)"
    assert python(code, path=stand_ins(tmp_path, "jax")) == "False\n"


def test_failed_import_changes_nothing(tmp_path):
    (tmp_path / "keras.py").write_text("raise ImportError('no keras today')")
    code = """
    import tf_dynemb
    for _ in range(2):
        try:
            import keras
        except ImportError as error:
            print(error)
    import importlib.util
    print(importlib.util.find_spec("keras").name)
    """
    assert python(code, path=tmp_path) == "no keras today\n" * 2 + "keras\n"


def test_every_module_that_registers_classes_is_known():
    package = pathlib.Path(de.__file__).parent
    registering = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path in package.rglob("*.py")
        if "@keras.saving.register_keras_serializable" in path.read_text(encoding="utf-8")
    ]
    assert len(registering) >= 4
    assert [name for name in registering if not name.startswith(_registration._MODULES)] == []


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    import keras

    inputs = keras.Input((2,), dtype="int64")
    vectors = de.layers.Embedding(3)(inputs)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(vectors))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=de.OptimizerWrapper(de.RowwiseAdagrad(0.1)), loss="mse")
    model.fit(np.array([[1, 2], [3, 4]]), np.zeros((2, 1)), verbose=0)
    path = tmp_path_factory.mktemp("model") / "model.keras"
    model.save(path)
    return path, model.predict(np.array([[1, 4]]), verbose=0)


@pytest.mark.parametrize(
    "first",
    [
        "import keras",
        pytest.param("import tensorflow; keras = tensorflow.keras", marks=pytest.mark.slow),
        pytest.param("import tf_dynemb._ops, keras", marks=pytest.mark.slow),
    ],
)
def test_saved_model_loads_after_import(saved_model, first):
    path, expected = saved_model
    code = f"""
    import sys
    import tf_dynemb
    {first}
    import numpy as np

    model = keras.models.load_model(sys.argv[1])
    import tf_dynemb as de
    assert type(model.layers[1]) is de.layers.Embedding
    assert type(model.optimizer) is de.OptimizerWrapper
    assert type(model.optimizer.inner_optimizer) is de.RowwiseAdagrad
    model.fit(np.array([[1, 2]]), np.zeros((1, 1)), verbose=0, epochs=0)
    print(float(model.predict(np.array([[1, 4]]), verbose=0)[0, 0]))
    model.fit(np.array([[1, 2]]), np.zeros((1, 1)), verbose=0)
    """
    assert float(python(code, path)) == pytest.approx(float(expected[0, 0]), abs=1e-6)


@pytest.mark.parametrize("imported", [False, True])
def test_other_backends_of_keras(imported):
    code = """
        import os, sys, types

        if sys.argv[1] == "True":
            keras = types.ModuleType("keras")
            keras.config = types.SimpleNamespace(backend=lambda: "torch")
            sys.modules["keras"] = keras
        else:
            os.environ["KERAS_BACKEND"] = "torch"
        import tf_dynemb as de

        assert de.serving.Reader
        for name in ("DynamicVariable", "layers", "lookup_sparse"):
            try:
                getattr(de, name)
            except RuntimeError as error:
                assert "the backend is 'torch'. Set the environment variable" in str(error)
                assert len(str(error)) <= 400
            else:
                raise AssertionError(name)
        assert "tensorflow" not in sys.modules
        """
    python(code, imported)


def test_legacy_keras_is_named(monkeypatch):
    legacy = type("Adam", (), {"__module__": "tf_keras.src.optimizers.adam"})
    with pytest.raises(TypeError, match=r"tf_keras is Keras 2; use keras\.optimizers"):
        de.OptimizerWrapper(legacy())
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    with pytest.warns(UserWarning, match="put it into models of `import keras`"):
        de.layers.Embedding(2)
