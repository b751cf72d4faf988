"""The errors of models that are loaded without the package: what they say, and what to do."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import _ops

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    inputs = keras.Input((3,), dtype="int64")
    outputs = keras.layers.Flatten()(de.layers.Embedding(2, name="t")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(de.OptimizerWrapper("sgd"), "mse")
    model.fit(np.array([[1, 2, 3]]), np.zeros((1, 6)), verbose=0)
    model.save(folder / "m.keras")
    de.export_saved_model(model, folder / "sm")
    return folder


LOADS = {
    "keras": "keras.models.load_model(sys.argv[1] + '/m.keras', safe_mode={safe})",
    "saved_model": "tf.saved_model.load(sys.argv[1] + '/sm')",
    "layer": "keras.layers.TFSMLayer(sys.argv[1] + '/sm')",
}


def load(models, how, before="", safe=True):
    """Loads a model in another process; returns the error that it prints, if any."""
    code = f"import sys, keras, tensorflow as tf\n{before}\n{LOADS[how].format(safe=safe)}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(models)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


@pytest.mark.skipif(not PAGE.exists(), reason="no documents: this tests a wheel")
@pytest.mark.parametrize("safe", [True, False])
def test_keras_names_the_package(models, safe):
    error = load(models, "keras", safe=safe)
    assert "Could not locate class 'Embedding'" in error
    assert "'registered_name': 'tf_dynemb>Embedding'" in error
    assert "'module': 'tf_dynemb.layers" in error
    assert "Could not locate class 'Embedding'" in PAGE.read_text(encoding="utf-8")
    assert load(models, "keras", before="import tf_dynemb", safe=safe) == ""


@pytest.mark.parametrize("how", ["saved_model", "layer"])
def test_tensorflow_names_an_operator(models, how):
    error = load(models, how)
    assert re.search("Op type not registered 'Dynemb[A-Za-z]+' in binary running on", error)
    assert load(models, how, before="import tf_dynemb") == ""
    library = f"tf.load_op_library({str(_ops.library_path(tf.__version__))!r})"
    assert load(models, how, before=library) == ""


def test_a_saved_model_names_the_package(models):
    described = json.loads((models / "sm" / "assets" / "tf_dynemb.json").read_text())
    assert described["writer"] == f"tf_dynemb {de.__version__}"
    assert described["load"].startswith("import tf_dynemb ")


@pytest.mark.skipif(not PAGE.exists(), reason="no documents: this tests a wheel")
def test_the_page_has_the_sentences():
    page = PAGE.read_text(encoding="utf-8")
    assert "Op type not registered 'DynembServedTable'" in page
    assert "Could not locate class 'Embedding'" in page
    assert "docs/troubleshooting.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    # The sentences are in the code.
    code = "".join(
        re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8"))
        for file in [*(ROOT / "tf_dynemb").rglob("*.py"), *(ROOT / "cc" / "ranks").glob("*.cc")]
    )
    for sentence in re.findall(r"^\*\*`(.*?)`\*\*", page, re.MULTILINE):
        if not sentence.startswith(("Op type", "Could not locate", "SIGBUS")):
            for part in filter(None, (p.strip() for p in sentence.split("…"))):
                assert part in code, part
