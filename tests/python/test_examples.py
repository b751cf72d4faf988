"""The examples and the README's code do what they say, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FIELDS = 14


def run_python(arguments: list[str], folder: Path) -> str:
    """Runs Python in `folder` and returns what it printed; fails with its errors."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def adult():
    """The examples' data module."""
    pytest.importorskip("pyarrow")
    sys.path.insert(0, str(EXAMPLES))
    try:
        import adult
    finally:
        sys.path.remove(str(EXAMPLES))
    return adult


def test_split_follows_the_protocol(adult):
    data = adult.load(seed=3)
    assert [len(part) for part in (data.test, data.validation, data.train)] == [16281, 6513, 26048]
    assert len(data.fields) == data.train.ids.shape[1] == FIELDS
    # A field's number is in the upper half, so ids of different fields differ.
    assert (data.train.ids >> 32 == np.arange(FIELDS)).all()
    # Test rows and their order do not depend on the seed; the held-out rows do.
    other = adult.load(seed=4)
    assert (other.test.labels == data.test.labels).all()
    assert (other.validation.ids != data.validation.ids).any()
    # Nothing is lost or taken twice.
    assert data.train.labels.sum() + data.validation.labels.sum() == 7841
    assert data.test.labels.sum() == 3846
    # Numeric fields have at most 32 buckets.
    age = data.fields.index("age")
    assert 25 <= len(np.unique(data.train.ids[:, age])) <= 32


def test_row_numbers_are_a_vocabulary(adult):
    vocabulary = adult.vocabulary_of(np.array([[30, 10], [20, 10]]))
    assert vocabulary.tolist() == [10, 20, 30]
    assert adult.row_numbers(np.array([10, 30, 5, 99]), vocabulary).tolist() == [1, 3, 0, 0]


def test_score_is_exact(adult):
    labels = np.array([0, 0, 1, 1], np.float32)
    scored = adult.score(labels, np.array([0.1, 0.4, 0.35, 0.8], np.float32))
    assert scored["auc"] == 0.75
    assert scored["accuracy"] == 0.75
    expected = -np.mean(np.log([0.9, 0.6, 0.35, 0.8]))
    assert scored["logloss"] == pytest.approx(expected, rel=1e-6)
    # Equal scores count half.
    assert adult.score(labels, np.full(4, 0.5, np.float32))["auc"] == 0.5


@pytest.mark.parametrize("embedding", ["dynamic", "keras"])
def test_quickstart(adult, tmp_path, embedding):
    printed = run_python(
        [str(EXAMPLES / "quickstart.py"), "--embedding", embedding, "--epochs", "1", "--quiet"],
        tmp_path,
    )
    folder = tmp_path / "outputs" / "quickstart"
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")

    figures = json.loads((folder / "metrics.json").read_text())
    assert 0.90 < figures["auc"] < 0.93, "one epoch gives about .91; above .93 something leaks"
    assert f"{figures['auc']:.4f}" in printed
    assert "FT-Transformer (published)" in printed

    with np.load(folder / "embedding.npz") as table:
        keys, vectors = table["keys"], table["vectors"]
    trained_ids = np.unique(adult.load(seed=0).train.ids)
    assert sorted(keys.tolist()) == trained_ids.tolist()
    assert vectors.shape == (len(keys), 8)
    assert np.isfinite(vectors).all()
    assert np.std(vectors) > 0.01, "the vectors have not moved from N(0, 0.01)"
    key = adult.category_id(adult.load().fields, "education", "Bachelors")
    vector = vectors[keys == key][0]
    assert np.array2string(vector, precision=4) in printed


def test_quickstart_repeats_itself(tmp_path):
    pytest.importorskip("pyarrow")
    runs = []
    for name in ("first", "second"):
        script = [str(EXAMPLES / "quickstart.py"), "--epochs", "1", "--quiet", "--seed", "5"]
        run_python([*script, "--output-dir", name], tmp_path)
        with np.load(tmp_path / name / "embedding.npz") as table:
            order = np.argsort(table["keys"])
            runs.append(table["vectors"][order])
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-3, atol=1e-4)


def test_custom_loop(tmp_path):
    pytest.importorskip("pyarrow")
    printed = run_python([str(EXAMPLES / "custom_loop.py"), "--epochs", "1"], tmp_path)
    auc = float(re.search(r"this run \(custom loop\)\s+([0-9.]+)", printed).group(1))
    assert 0.90 < auc < 0.93
    rows = dict(re.findall(r"^  (\S+)\s+(\d+)$", printed, re.MULTILINE))
    assert len(rows) == FIELDS
    assert int(rows["gender"]) == 2


@pytest.mark.parametrize("script", ["quickstart.py", "custom_loop.py"])
def test_help_explains_every_option(tmp_path, script):
    pytest.importorskip("pyarrow")
    printed = run_python([str(EXAMPLES / script), "--help"], tmp_path)
    described = re.sub(r"\n {10,}", "  ", printed.partition("options:")[2])
    options = [line for line in described.splitlines() if line.startswith("  -")]
    assert len(options) >= 6
    for line in options:
        assert re.search(r"\S {2,}\S", line[2:]), f"no explanation: {line}"


def readme_blocks() -> list[str]:
    """The Python code in the README."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)


@pytest.mark.parametrize("number", range(len(readme_blocks())))
def test_readme_code_runs(tmp_path, number):
    run_python(["-c", readme_blocks()[number]], tmp_path)


def test_readme_has_its_examples():
    blocks = readme_blocks()
    assert len(blocks) == 3
    assert "de.layers.Embedding" in blocks[0]
    assert "de.lookup_sparse" in blocks[1]
    assert "profiler" in blocks[2]
