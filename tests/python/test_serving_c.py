"""examples/serving_c, a client in C: the numbers of `model.predict`, deltas, and errors."""

import pathlib
import shutil
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from online_trainer import PROBE, count_of, predictions, trainer

import tf_dynemb as de
from tf_dynemb import _ops, layers

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ROOT / "examples" / "serving_c"
LIBRARY = str(_ops.library_path(tf.__version__))

pytestmark = [
    pytest.mark.skipif(not SOURCES.is_dir(), reason="no sources: this tests a wheel"),
    pytest.mark.skipif(shutil.which("make") is None, reason="no make"),
]

IDS = np.array([[1, 2, 3], [-1, 50, 2**40], [7, 7, -(2**63)]])
PRICES = np.array([[0.1], [-3e-38], [1 / 3]], np.float32)


@pytest.fixture(scope="module")
def score(tmp_path_factory):
    """The path of the program."""
    out = tmp_path_factory.mktemp("serving_c")
    command = ["make", "-s", "-C", str(SOURCES), f"OUT={out}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(out / "score")


def make_model():
    """A model with two tables and two inputs."""
    ids, price = keras.Input([3], dtype="int64", name="ids"), keras.Input([1], name="price")
    parts = [layers.Embedding(dim, combiner="mean", name=f"e{dim}")(ids) for dim in (4, 19)]
    both = keras.layers.Concatenate()([*parts, price])
    outputs = {
        "click": keras.layers.Dense(1, "sigmoid", name="click")(both),
        "hidden": keras.layers.Dense(3, name="hidden")(both),
    }
    return keras.Model([ids, price], outputs)


def train(model, seed):
    rng = np.random.default_rng(seed)
    for layer in model.layers[1:3]:
        table = layer.table
        keys = rng.choice(60, 40, replace=False)
        table.upsert(keys, rng.normal(size=[40, table.dimension]))
        table.erase([int(rng.integers(60))])
    for weight in de.filter_variables(model.weights)[1]:
        weight.assign(rng.normal(size=weight.shape))


def ids_text(name, ids):
    rows, columns = ids.shape
    return [f"{name} int64 {rows} {columns}", *(" ".join(map(str, row)) for row in ids.tolist())]


def batch_text():
    lines = ["# a batch", *ids_text("ids", IDS)]
    lines += ["", "price float32 3 1 # as many digits as needed"]
    lines += [f"{value:.9g}" for value in PRICES[:, 0]]
    return "\n".join(lines) + "\n"


def tensors(text):
    """Reads the format of examples/serving_c/tensors.h."""
    words, found = iter([line.partition("#")[0].split() for line in text.splitlines()]), {}
    for header in filter(None, words):
        name, dtype, *shape = header
        shape = [int(size) for size in shape]
        values = [next(words) for _ in range(int(np.prod(shape[:-1])))]
        found[name] = np.array(values, dtype).reshape(shape)
    return found


def assert_scores(printed, model):
    found, expected = tensors(printed), model.predict([IDS, PRICES], verbose=0)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name


@pytest.fixture
def exported(tmp_path):
    """A model, its export that follows `deltas`, its watermark, and the path of a batch."""
    model = make_model()
    train(model, 1)
    watermark = de.export_saved_model(
        model, tmp_path / "model", follow=tmp_path / "deltas", follow_seconds=0.05
    )
    (tmp_path / "batch.txt").write_text(batch_text())
    return model, watermark, tmp_path


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_answers_before_and_after_a_delta(score, exported):
    model, watermark, folder = exported
    answers = [model.predict([IDS, PRICES], verbose=0)["click"]]
    train(model, 2)
    written = de.incremental_dump(folder / "elsewhere", model, since=watermark)
    after = model.predict([IDS, PRICES], verbose=0)["click"]
    assert not np.array_equal(after, answers[0])
    delta = ["delta", folder / "elsewhere"]
    done = run(score, LIBRARY, folder / "model", folder / "batch.txt", *delta, *delta)
    assert done.returncode == 0, done.stderr[-2000:]
    first, comment, second, again, third = (
        done.stdout.replace("# delta", "@# delta").replace("\nclick", "@click").split("@")
    )
    assert tensors(first)["click"].tobytes() == answers[0].tobytes()
    assert f"applied 1 watermark {written.tick}" in comment
    assert_scores(second, model)
    assert "applied 0" in again
    assert third == second


def test_it_follows_a_path(score, exported):
    model, watermark, folder = exported
    command = [score, LIBRARY, folder / "model", folder / "batch.txt", "wait", "60", "wait", "0.2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as client:
        lines = [client.stdout.readline() for _ in range(4 + 4)]  # two outputs of three rows
        assert_scores("".join(lines), model)
        time.sleep(0.1)
        train(model, 3)
        de.incremental_dump(folder / "deltas", model, since=watermark)
        printed, errors = client.communicate(timeout=60)
    assert printed.startswith("# wait\n")
    assert_scores(printed, model)
    assert client.returncode == 1
    assert "score: the answer is the same after 0.2 seconds" in errors


@pytest.mark.slow
def test_each_answer_is_a_prediction_of_the_trainer(score, tmp_path, path_or_s3):
    """The client has the rows and the weights of one snapshot, while others are published."""
    count = count_of(path_or_s3)
    lines = [line for name, ids in PROBE.items() for line in ids_text(name, ids)]
    (tmp_path / "batch.txt").write_text("\n".join(lines))
    command = [score, LIBRARY, tmp_path / "model", tmp_path / "batch.txt"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (
        trainer(tmp_path, path_or_s3) as process,
        subprocess.Popen([*command, *["wait", "3"] * count], **pipes) as client,
    ):
        first = [client.stdout.readline() for _ in range(1 + len(PROBE["user"]))]
        process.stdin.write("\n")
        process.stdin.flush()
        printed, _ = client.communicate(timeout=300)
    order = list(predictions(tmp_path).values())
    answers = ["".join(first), *printed.split("# wait\n")[1:]]
    places = [order.index(next(iter(tensors(each).values())).tobytes()) for each in answers]
    assert places[0] == 0
    assert places == sorted(set(places))
    assert places[-1] == len(order) - 1 == count
    assert len(places) > count / 10


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("", "the batch has no input 'ids' of signature 'serving_default'"),
        ("ids int64 1 3\n1 2", ":2: 'ids' has 2 values, expected 3"),
        ("ids int64 1 3\n1 2 x", ":2: 'x' is not a value of 'ids'"),
        ("ids int64 1 3\n1 2 9223372036854775808", ":2: '9223372036854775808' is not a value"),
        ("ids int32 1 1\n\n2147483648", ":3: '2147483648' is not a value"),
        ("ids uint64 1 1\n-1", ":2: '-1' is not a value"),
        ("price float32 1 1\n1e99", ":2: '1e99' is not a value of 'price'"),
        ("ids string 1\na", ":1: 'ids' has the type 'string', expected int32"),
        ("ids", ":1: 'ids' has the type ''"),
        ("ids int64 -1\n", ":1: '-1' is not a dimension"),
        ("ids int64 99999 99999\n", ":1: '99999' is not a dimension"),
        ("ids int64 1 1 1 1 1 1 1 1 1\n", ":1: too many dimensions"),
        ("ids int64 1 3\n1 2 3\nprice float32 1 1\n1\nmore int32\n4", "the batch has 3 tensors"),
        ("ids int32 1 3\n1 2 3\nprice float32 1 1\n1", "running signature serving_default"),
        ("ids int64 1 3\n1 2 3\nprice float32 2 1\n1 2", "running signature serving_default"),
        (b"\0", "batch.txt is not text"),
    ],
)
def test_wrong_batches(score, exported_once, batch, message):
    file = exported_once / "batch.txt"
    file.write_bytes(batch if isinstance(batch, bytes) else batch.encode())
    done = run(score, LIBRARY, exported_once / "model", file)
    assert done.returncode == 1
    assert done.stdout == ""
    # TensorFlow may have logged lines before.
    assert message in f"\n{done.stderr}".partition("\nscore: ")[2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bazel") is None, reason="no bazel")
def test_operators_linked_to_the_program(exported):
    """As in a server that is built with them: no library is loaded."""
    build = ["bazel", "build", "//examples/serving_c:score_linked"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    model, watermark, folder = exported
    train(model, 5)
    de.incremental_dump(folder / "elsewhere", model, since=watermark)
    program = ROOT / "bazel-bin" / "examples" / "serving_c" / "score_linked"
    arguments = [folder / "model", folder / "batch.txt", "delta", folder / "elsewhere"]
    done = run(program, "-", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_scores("#" + done.stdout.partition("# delta")[2], model)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bazel") is None, reason="no bazel")
def test_a_workspace_that_links_the_operators(tmp_path):
    """The lines of docs/serving.md, with a stub of TensorFlow: Bazel finds all dependencies."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    lines = text.partition("and defines:\n")[2].partition("\n\nTensorFlow Serving")[0]
    lines = "\n".join(line.strip() for line in lines.splitlines()).replace("...", str(ROOT))
    # Where Bazel may download, it needs none of these.
    for name, folder in {
        "org_tensorflow": tmp_path / "tensorflow",
        "rules_cc": ROOT / "bazel" / "rules_cc",
        "rules_java": ROOT / "bazel" / "rules_java",
        "remote_coverage_tools": ROOT / "bazel" / "coverage_tools",
    }.items():
        lines += f'\nlocal_repository(name = "{name}", path = "{folder}")'
    core, server = tmp_path / "tensorflow" / "tensorflow" / "core", tmp_path / "server"
    core.mkdir(parents=True)
    server.mkdir()
    (tmp_path / "tensorflow" / "WORKSPACE").touch()
    public = 'visibility = ["//visibility:public"]'
    (core / "BUILD").write_text(f'cc_library(name = "framework", {public})\n')
    (server / "WORKSPACE").write_text(lines + "\n")
    operators = "@tf_dynemb//cc/tf:operators"
    (server / "BUILD").write_text(f'cc_binary(name = "server", deps = ["{operators}"])\n')
    bazel = ["bazel", f"--output_base={tmp_path / 'out'}"]
    command = [*bazel, "build", "--nobuild", "//:server", "@tf_dynemb//cc/tf:all"]
    try:
        done = subprocess.run(command, cwd=server, capture_output=True, text=True, check=False)
    finally:
        subprocess.run([*bazel, "shutdown"], cwd=server, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    de.export_saved_model(make_model(), folder / "model")
    return folder


def test_errors(score, exported_once):
    model, batch = exported_once / "model", exported_once / "good.txt"
    batch.write_text(batch_text())
    damaged = exported_once / "damaged"
    shutil.copytree(model, damaged)
    vectors = next(damaged.rglob("*.vectors.npy"))
    vectors.write_bytes(vectors.read_bytes()[:-1])
    changed = exported_once / "changed"
    shutil.copytree(model, changed)
    with (changed / "saved_model.pb").open("ab") as graph:
        graph.write(b"\xc2\x3e\x01x")  # a field that TensorFlow does not know, and ignores
    cases = {
        (): "usage: score LIBRARY MODEL BATCH",
        (LIBRARY, model, batch, "delta"): "usage: score",
        (LIBRARY, model, batch, "apply", "x"): "'apply' is neither delta nor wait",
        ("/nowhere.so", model, batch): "loading /nowhere.so: /nowhere.so: cannot open",
        ("-", model, batch): "Op type not registered 'Dynemb",
        (LIBRARY, exported_once, batch): f"loading {exported_once}: ",
        (LIBRARY, damaged, batch): f"{vectors} has",
        (LIBRARY, changed, batch): f"{changed}/saved_model.pb is damaged",
        (LIBRARY, model, "/nowhere"): "/nowhere: No such file",
        (LIBRARY, model, batch, "delta", "/nowhere"): "/nowhere holds no snapshot",
    }
    for arguments, message in cases.items():
        done = run(score, *arguments)
        assert done.returncode == 1, arguments
        assert "score: " in done.stderr
        assert message in done.stderr, arguments


def test_a_module_without_apply_delta(score, exported_once):
    path = exported_once / "plain"
    model = make_model()
    train(model, 4)
    model.export(path, verbose=False)
    (exported_once / "batch.txt").write_text(batch_text())
    done = run(score, LIBRARY, path, exported_once / "batch.txt", "delta", "/nowhere")
    assert_scores(done.stdout, model)
    assert done.returncode == 1
    assert "the model has no signature 'apply_delta'; it has:" in done.stderr
    assert "serving_default" in done.stderr
