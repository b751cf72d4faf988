"""Runs the examples and the code of the README, each in a separate process."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from example_runs import EXAMPLES, ROOT, code_blocks, examples_module, run_python

import tf_dynemb as de

FIELDS = 14


@pytest.fixture(scope="module")
def adult():
    """The examples' data module."""
    pytest.importorskip("pyarrow")
    return examples_module("adult")


def test_split_follows_the_protocol(adult):
    data = adult.load(seed=3)
    assert [len(part) for part in (data.test, data.validation, data.train)] == [16281, 6513, 26048]
    assert len(data.fields) == data.train.ids.shape[1] == FIELDS
    # The upper 32 bits of an id are its field's number, so ids of different fields differ.
    assert (data.train.ids >> 32 == np.arange(FIELDS)).all()
    # The test rows and their order do not depend on the seed; the validation rows do.
    other = adult.load(seed=4)
    assert (other.test.labels == data.test.labels).all()
    assert (other.validation.ids != data.validation.ids).any()
    # No row is lost or used twice.
    assert data.train.labels.sum() + data.validation.labels.sum() == 7841
    assert data.test.labels.sum() == 3846
    # Numeric fields have at most 32 buckets.
    age = data.fields.index("age")
    assert 25 <= len(np.unique(data.train.ids[:, age])) <= 32


def test_row_numbers_of_a_vocabulary(adult):
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
    # A pair of equal scores counts half.
    assert adult.score(labels, np.full(4, 0.5, np.float32))["auc"] == 0.5


def run_quickstart(folder, embedding, warm=True):
    script = [str(EXAMPLES / "quickstart.py"), "--embedding", embedding]
    return run_python([*script, "--epochs", "1", "--quiet", "--seed", "5"], folder, warm)


@pytest.fixture(scope="module")
def dynamic_run(tmp_path_factory):
    """A run with tables: its folder, and the text that it printed."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, run_quickstart(folder, "dynamic")


@pytest.mark.parametrize("embedding", ["dynamic", "keras"])
def test_quickstart(adult, tmp_path, embedding, request):
    if embedding == "dynamic":
        tmp_path, printed = request.getfixturevalue("dynamic_run")
    else:
        printed = run_quickstart(tmp_path, embedding)
    folder = tmp_path / "outputs" / "quickstart"
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")

    figures = json.loads((folder / "metrics.json").read_text())
    assert 0.90 < figures["auc"] < 0.93, "one epoch gives about 0.91; more than 0.93 means a leak"
    assert f"{figures['auc']:.4f}" in printed
    assert "FT-Transformer (published)" in printed

    with np.load(folder / "embedding.npz") as table:
        keys, vectors = table["keys"], table["vectors"]
    trained_ids = np.unique(adult.load(seed=5).train.ids)
    assert sorted(keys.tolist()) == trained_ids.tolist()
    assert vectors.shape == (len(keys), 8)
    assert np.isfinite(vectors).all()
    assert np.std(vectors) > 0.01, "training has not changed the initial N(0, 0.01)"
    key = adult.category_id(adult.load().fields, "education", "Bachelors")
    vector = vectors[keys == key][0]
    assert np.array2string(vector, precision=4) in printed
    if embedding == "dynamic":
        kinds = re.findall(r"^  (base|delta) +(\d+) rows", printed, re.MULTILINE)
        assert [kind for kind, _ in kinds] == ["base", "delta"]
        assert int(kinds[0][1]) == len(keys)
        assert int(kinds[1][1]) > 0
    check_summary(printed, embedding, figures, len(keys), folder)


def check_summary(printed, embedding, figures, rows, folder):
    """The end of the output: scores, time, files, and commands that can be run as they are."""
    assert printed.count("Summary\n") == 1
    end = printed.split("Summary\n")[1]
    scores = dict(re.findall(r"^(.+?) +(0\.9\d{3}) +0\.\d{4} +\S+$", end, re.M))
    assert scores["keras.layers.Embedding"] == "0.9127"
    assert scores["FT-Transformer (published)"] == "0.9135"
    assert scores[f"this run ({embedding})"] == f"{figures['auc']:.4f}"
    took = re.search(r"^trained +1 epoch in ([0-9.]+) s, [0-9,]+ rows/s; ([0-9.]+) s", end, re.M)
    assert float(took[1]) == pytest.approx(figures["seconds"], abs=0.06)
    assert float(took[2]) > float(took[1])
    assert re.search(rf"^table +{rows} rows of 8 floats$", end, re.M)

    files = dict(re.findall(r"^  (\S+) +([0-9,]+) bytes  \S", end, re.M))
    assert files.keys() == {path.name for path in folder.iterdir()}
    size = (folder / "embedding.npz").stat().st_size
    assert int(files["embedding.npz"].replace(",", "")) == size

    commands = [line.split("   ")[0].strip() for line in end.split("\nnext\n")[1].splitlines()]
    assert len(commands) == 3
    assert commands[2] == "make serve-example"
    other = {"dynamic": ["--embedding", "keras"], "keras": []}[embedding]
    python, script, *arguments = commands[0].split()
    assert Path(folder.parents[1], python).resolve() == Path(sys.executable).resolve()
    assert Path(folder.parents[1], script).resolve() == EXAMPLES / "quickstart.py"
    assert arguments == other
    if embedding == "dynamic":
        run_python(commands[1].split()[1:], folder.parents[1])


@pytest.mark.skipif(not (ROOT / "benchmarks" / "results").is_dir(), reason="no sources")
def test_the_figures_of_keras_come_from_the_benchmark(adult):
    text = (ROOT / "benchmarks" / "results" / "2026-11-21_cpu.txt").read_text()
    for model, figures in adult.MEASURED.items():
        assert model == "keras.layers.Embedding"
        for metric, value in zip(("auc", "accuracy", "logloss"), figures, strict=True):
            (line,) = re.findall(rf"^quickstart: {metric}, mean.*$", text, re.M)
            assert f" {value:.4f} " in line


def test_quickstart_is_reproducible(dynamic_run, tmp_path):
    runs = []
    run_quickstart(tmp_path, "dynamic", warm=False)  # with other hash values
    for folder in (dynamic_run[0], tmp_path):
        with np.load(folder / "outputs" / "quickstart" / "embedding.npz") as table:
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


def test_model_parallel_on_one_rank(adult, tmp_path):
    printed = run_python(
        [str(EXAMPLES / "model_parallel.py"), "--epochs", "1", "--output-dir", "out"], tmp_path
    )
    auc = float(re.search(r"this run \(1 rank\)\s+([0-9.]+)", printed).group(1))
    assert 0.90 < auc < 0.93
    reader = de.serving.Reader(tmp_path / "out" / "tables")
    assert reader.contains(np.unique(adult.load(seed=0).train.ids)).all()
    key = adult.category_id(adult.load().fields, "education", "Bachelors")
    assert np.array2string(reader.lookup(key), precision=4) in printed


def write_ratings(path: Path, rows: int) -> None:
    """Writes ratings; many users and movies first occur in the second half."""
    rng = np.random.default_rng(0)
    arrived = 30 + np.arange(rows) // 25  # the numbers of users and of movies so far
    users, movies = (rng.integers(0, arrived) for _ in range(2))
    biases = rng.normal(size=(2, arrived[-1]))
    ratings = np.clip(np.rint(6 + biases[0, users] + biases[1, movies]), 0, 10).astype(int)
    lines = [
        f"{user * 2**33}::{movie}::{rating}::{time}\n"
        for time, (user, movie, rating) in enumerate(zip(users, movies, ratings, strict=True))
    ]
    path.write_text("".join(lines[i] for i in rng.permutation(rows)))


def test_incremental_export(tmp_path):
    pytest.importorskip("matplotlib")
    write_ratings(tmp_path / "ratings.dat", rows=4000)
    script = [
        str(EXAMPLES / "incremental_export.py"),
        "--ratings",
        "ratings.dat",
        "--plot",
        "a.png",
    ]
    printed = run_python([*script, "--steps", "5", "--batch-size", "40"], tmp_path)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    folder = tmp_path / "outputs" / "incremental_export"
    assert sorted(path.name for path in folder.iterdir()) == ["follower.npz", "metrics.json"]

    figures = json.loads((folder / "metrics.json").read_text())
    assert figures["difference"] < 1e-5
    assert figures["follower"] == pytest.approx(figures["published"], abs=1e-6)
    assert figures["follower_frozen"] == pytest.approx(figures["frozen"], abs=1e-6)
    assert figures["streaming"] < figures["published"] < figures["frozen"] - 0.03
    assert f"{figures['follower']:.4f}" in printed

    base, *deltas = figures["publications"]
    assert [delta["step"] for delta in deltas] == list(range(5, 50, 5))
    with np.load(folder / "follower.npz") as saved:
        assert saved["following"].shape == (2000,)
        assert not saved["has_tensorflow"]
    # The follower predicted each row of the second half, and has rows for almost all ids.
    assert 100 < base["new_ids"] < 240
    assert all(delta["new_ids"] > 0 for delta in deltas)
    assert 300 < base["new_ids"] + sum(delta["new_ids"] for delta in deltas) <= 380
    assert all(0 < delta["lag_seconds"] < 60 and delta["lag_steps"] <= 5 for delta in deltas)


def test_larger_than_memory(tmp_path):
    script = [str(EXAMPLES / "larger_than_memory.py"), "--quiet", "--folder", "rows"]
    sizes = ["--ids", "20000", "--batch", "512", "--steps", "30", "--memory", "0.25"]
    printed = run_python([*script, *sizes], tmp_path)
    assert printed.endswith("All rows have the same bits.\n")
    rows, in_files = map(int, re.search(r"(\d+) rows, (\d+) of them in files", printed).groups())
    assert rows / 2 < in_files < rows
    assert int(re.search(r"from files to memory: (\d+)", printed).group(1)) > 100
    assert not list((tmp_path / "rows").iterdir())


SCRIPTS = [path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()]


def test_scripts_are_found():
    assert {"dlrm.py", "follower.py", "model_parallel.py", "quickstart.py"} < set(SCRIPTS)


HELP = """
import contextlib, io, json, runpy, sys

sys.path.insert(0, sys.argv[1])
texts = {}
for script in sys.argv[2:]:
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        runpy.run_path(f"{sys.path[0]}/{script}", run_name="__main__")
    texts[script] = text.getvalue()
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def helps(tmp_path_factory):
    """The output of each script for --help; one process imports TensorFlow for all of them."""
    pytest.importorskip("pyarrow")
    printed = run_python(["-c", HELP, str(EXAMPLES), *SCRIPTS], tmp_path_factory.mktemp("help"))
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_option(helps, script):
    described = re.sub(r"\n {10,}", "  ", helps[script].partition("options:")[2])
    options = [line for line in described.splitlines() if line.startswith("  -")]
    assert len(options) >= 6
    for line in options:
        assert re.search(r"\S {2,}\S", line[2:]), f"no explanation: {line}"


def numbered_blocks(page):
    return [pytest.param(page, i, id=f"{page}-{i}") for i in range(len(code_blocks(page)))]


@pytest.mark.parametrize(
    ("page", "number"),
    [
        *numbered_blocks("README.md"),
        *numbered_blocks("docs/custom_loops.md"),
        *numbered_blocks("docs/dumps.md"),
        *numbered_blocks("docs/ranks.md"),
        *numbered_blocks("docs/recipes.md"),
        *numbered_blocks("docs/server.md"),
        *numbered_blocks("docs/migrating_from_torchrec.md"),
    ],
)
def test_code_of_the_documents_runs(tmp_path, page, number):
    run_python(["-c", code_blocks(page)[number]], tmp_path)


@pytest.mark.slow
def test_the_trainer_of_the_documents_restarts(tmp_path):
    _, fit, loop = code_blocks("docs/dumps.md")
    check = """
reader = de.serving.Reader("online" if "labels" in globals() else "hourly")
assert np.array_equal(reader.lookup(np.arange(1000)), model.layers[0](np.arange(1000)))
assert np.array_equal(reader.dense()["layers/2/kernel"], model.layers[2].kernel)
print(int(model.optimizer.iterations), reader.extra)
"""
    for epochs in (3, 5):
        output = run_python(["-c", fit.replace("epochs=3", f"epochs={epochs}") + check], tmp_path)
        place = {"fit": {"epoch": epochs, "batch": 0}}
        assert output.splitlines()[-1] == f"{20 * epochs} {place}"
    for hours in (3, 5):
        code = loop.replace("range(hour, 3)", f"range(hour, {hours})") + check
        output = run_python(["-c", code], tmp_path)
        assert output.splitlines()[-1] == f"{hours} {{'hour': {hours - 1}}}"


@pytest.mark.slow
def test_code_for_keras_users_runs(tmp_path):
    blocks = code_blocks("docs/from_keras_embedding.md")
    output = run_python(["-c", "\n".join(blocks)], tmp_path)
    assert "5 rows" in output
    assert "4 rows" in output


@pytest.mark.slow
def test_code_of_online_learning_runs(tmp_path):
    output = run_python(["-c", "\n".join(code_blocks("docs/online_learning.md"))], tmp_path)
    assert output.splitlines()[-1].endswith(" v7 (1, 1)")


@pytest.mark.slow
def test_code_of_serving_runs(tmp_path):
    """Deleting the model ends its thread, and closes its files."""
    maps = 'open("/proc/self/maps").read()'
    count = f'print(len(os.listdir("/proc/self/task")), {maps}.count(".npy"))'
    _, follow, stop = code_blocks("docs/serving.md")
    code = ["import os", follow, count, stop, count]
    output = run_python(["-c", "\n".join(code)], tmp_path).splitlines()
    before, after = (tuple(map(int, line.split())) for line in output[-2:])
    assert before[0] > after[0]
    assert before[1] > after[1] == 0


@pytest.mark.slow
def test_code_of_choosing_what_stays_runs(tmp_path):
    fit = """
import keras
model = keras.Sequential([keras.Input([1], dtype="int64"), layer, keras.layers.Flatten()])
model.compile(de.OptimizerWrapper("adam"), "mse")
data = tf.data.Dataset.from_tensor_slices(([[[1], [2]]], [tf.zeros([2, 16])]))
"""
    *blocks, watching = code_blocks("docs/choosing_what_stays.md")
    program = "\n".join(["import tensorflow as tf", *blocks, fit, watching])
    output = run_python(["-c", program], tmp_path)
    assert "[40 30 20 -1]" in output
    assert "[[0. 0.]\n [0. 0.]\n [0. 0.]]\n[[1. 1.]\n [0. 0.]]\n2\n" in output
    assert list((tmp_path / "logs").glob("events*"))


@pytest.mark.slow
def test_code_of_larger_than_memory_runs(tmp_path):
    output = run_python(["-c", "\n".join(code_blocks("docs/larger_than_memory.md"))], tmp_path)
    assert output == (
        "1000 rows, 900 in files\nfile host\ntoo many ids for max_dram_for_vectors\n"
        "1000 rows loaded\n3 rows after a restart\n"
    )
    # One of all tables is persistent.
    assert [file.name for file in (tmp_path / "rows").iterdir()] == ["clicks.persistent"]


@pytest.mark.slow
def test_the_documents_have_all_examples():
    (first,) = code_blocks("README.md")
    assert "de.layers.Embedding" in first
    assert "Reader" in first
    loop, rates, profiler = code_blocks("docs/custom_loops.md")
    disk, restart, hours = code_blocks("docs/dumps.md")
    (ranks,) = code_blocks("docs/ranks.md")
    assert "de.lookup_sparse" in loop
    assert "MultiOptimizer" in rates
    assert "follow" in disk
    assert "Publish" in restart
    assert "de.load" in hours
    assert "SynchronizeRanks" in ranks
    assert "profiler" in profiler


@pytest.mark.slow
def test_figures_of_the_readme_are_current(tmp_path):
    run_python(["-m", "benchmarks.readme_figures", "--folder", str(tmp_path)], ROOT)
    for name, page in (
        ("life.svg", "README.md"),
        ("speed.svg", "README.md"),
        ("memory.svg", "docs/performance.md"),
    ):
        assert (tmp_path / name).read_bytes() == (ROOT / "docs/figures" / name).read_bytes()
        assert f"figures/{name}" in (ROOT / page).read_text()
