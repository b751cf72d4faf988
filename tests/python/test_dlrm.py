"""The modules of examples/dlrm.py: Criteo's layouts, synthetic clicks, the model, the phases."""

from __future__ import annotations

import json
import re
import struct
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from example_runs import EXAMPLES, examples_module, run_python

import tf_dynemb as de

criteo = examples_module("criteo")
dlrm_model = examples_module("dlrm_model")
scoring = examples_module("scoring")
step_phases = examples_module("step_phases")
synthetic = examples_module("synthetic_clicks")

COUNT = 60
HOTNESS = criteo.HOTNESS


@pytest.fixture
def clicks():
    """Labels, dense counts (some negative, as in Criteo's data), multi-hot ids, one-hot ids."""
    rng = np.random.default_rng(0)
    return SimpleNamespace(
        labels=rng.integers(0, 2, COUNT),
        counts=rng.integers(-2, 1000, (COUNT, 13)),
        ids=rng.integers(0, 2**31, (COUNT, sum(HOTNESS))),
        single=rng.integers(0, 2**31, (COUNT, 26)),
    )


def write(path, form, *columns):
    """Writes samples, packed by Python's struct."""
    rows = zip(*(np.reshape(column, (COUNT, -1)).tolist() for column in columns), strict=True)
    samples = [struct.pack("<" + form, *(n for part in row for n in part)) for row in rows]
    path.write_bytes(b"".join(samples))


def read_all(source):
    parts = [source.read(begin, min(begin + 7, COUNT)) for begin in range(0, COUNT, 7)]
    dense, ids, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    assert (dense.dtype, ids.dtype, labels.dtype) == (np.float32, np.int32, np.float32)
    assert len(source) == COUNT
    return dense, ids, labels


def test_the_layout_of_the_reference(tmp_path, clicks):
    write(tmp_path / "train_data.bin", "40i", clicks.labels, clicks.counts, clicks.single)
    write(tmp_path / "test_data.bin", "40i", 1 - clicks.labels, clicks.counts, clicks.single)
    train, test = criteo.open_clicks(tmp_path, "reference", HOTNESS)
    assert train.hotness == (1,) * 26
    dense, ids, labels = read_all(train)
    np.testing.assert_allclose(dense, np.log(np.maximum(clicks.counts, 0) + 1), rtol=1e-6)
    np.testing.assert_array_equal(ids, clicks.single)
    np.testing.assert_array_equal(labels, clicks.labels)
    np.testing.assert_array_equal(read_all(test)[2], 1 - clicks.labels)


def test_the_layout_of_mlperf(tmp_path, clicks):
    dense = np.log(clicks.counts + 3.0).astype(np.float32)
    for name in ("train", "val"):
        write(tmp_path / f"{name}_data.bin", "i13f214i", clicks.labels, dense, clicks.ids)
        clicks.labels = 1 - clicks.labels
    train, test = criteo.open_clicks(tmp_path, "mlperf", HOTNESS)
    assert train.hotness == HOTNESS
    assert [a.tolist() for a in read_all(train)] == [
        dense.tolist(),
        clicks.ids.tolist(),
        clicks.labels.tolist(),
    ]
    np.testing.assert_array_equal(read_all(test)[2], 1 - clicks.labels)


@pytest.mark.parametrize("logarithms", [True, False])
def test_the_layout_of_columns(tmp_path, clicks, logarithms):
    for name in ("train", "test"):
        folder = tmp_path / name
        folder.mkdir()
        write(folder / "label.bin", "i" if logarithms else "f", clicks.labels)
        write(folder / "dense.bin", "13i" if logarithms else "13f", clicks.counts)
        write(folder / "category.bin", "214i", clicks.ids)
        about = {
            "vocab_sizes": list(criteo.ROWS),
            "label_raw_type": "int32" if logarithms else "float32",
            "dense_raw_type": "int32" if logarithms else "float32",
            "category_raw_type": "int32",
            "dense_log": logarithms,
            "hotness_per_table": list(HOTNESS),
        }
        (folder / "metadata.json").write_text(json.dumps(about))
    train, test = criteo.open_clicks(tmp_path, "columns", (1,) * 26)
    for source in (train, test):
        dense, ids, labels = read_all(source)
        wanted = np.log(clicks.counts + 3) if logarithms else clicks.counts
        np.testing.assert_allclose(dense, wanted, rtol=1e-6)
        np.testing.assert_array_equal(ids, clicks.ids)
        np.testing.assert_array_equal(labels, clicks.labels)
    write(tmp_path / "train" / "dense.bin", "26i", np.repeat(clicks.counts, 2, 1))
    with pytest.raises(ValueError, match="60 labels for 120 samples' dense"):
        criteo.open_clicks(tmp_path, "columns", HOTNESS)


def test_files_of_another_layout_are_refused(tmp_path, clicks):
    write(tmp_path / "train_data.bin", "40i", clicks.labels, clicks.counts, clicks.single)
    write(tmp_path / "test_data.bin", "40i", clicks.labels, clicks.counts, clicks.single)
    with pytest.raises(ValueError, match="9600 bytes, no multiple of the 912 of a sample"):
        criteo.open_clicks(tmp_path, "mlperf", HOTNESS)
    (tmp_path / "train_data.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes"):
        criteo.open_clicks(tmp_path, "reference", HOTNESS)


def made(count=3000, first=0, seed=5, exponent=1.1, rows=500):
    shape = (HOTNESS, tuple(min(rows, n) for n in criteo.ROWS), exponent, seed)
    return synthetic.SyntheticClicks(count, *shape, first=first)


def test_synthetic_samples_are_functions_of_their_number():
    whole = made().read(0, 3000)
    for begin, end in [(0, 1), (17, 2500), (2999, 3000), (40, 40)]:
        for part, whole_part in zip(made().read(begin, end), whole, strict=True):
            np.testing.assert_array_equal(part, whole_part[begin:end])
    np.testing.assert_array_equal(made(first=100).read(0, 50).ids, whole.ids[100:150])
    assert (made(seed=6).read(0, 10).ids != whole.ids[:10]).mean() > 0.5


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("whole", [True, False])
def test_batches_are_divided_among_ranks(ranks, whole):
    source = made(count=100)
    rank_batches = [
        list(criteo.Batches(source, 30, SimpleNamespace(rank=rank, size=ranks), whole))
        for rank in range(ranks)
    ]
    assert {len(batches) for batches in rank_batches} == {3 if whole else 4}
    together = [
        np.concatenate([part.ids for part in parts]) for parts in zip(*rank_batches, strict=True)
    ]
    assert [len(batch) for batch in together] == [30, 30, 30, 10][: len(together)]
    np.testing.assert_array_equal(np.concatenate(together), source.read(0, 100 - 10 * whole).ids)
    if whole:
        assert {len(part.labels) for batches in rank_batches for part in batches} == {30 // ranks}
    few = criteo.Batches(source, 30, SimpleNamespace(rank=0, size=1), whole, most=2)
    assert (len(few), few.samples) == (2, 60)


def test_synthetic_ids_follow_a_power_law():
    ids = made(count=20000, exponent=1.2, rows=10**6).read(0, 20000).ids
    for column in (0, 30, 200):  # of features with a million ids
        counts = np.sort(np.unique(ids[:, column], return_counts=True)[1])[::-1]
        assert len(counts) > 2000
        # The continuous law between ranks 1, 2, 11 and 1e6 + 1.
        mass = np.array([1.0, 2, 11, 10**6 + 1]) ** -0.2
        wanted = (mass[0] - mass[[1, 2]]) / (mass[0] - mass[3])
        got = np.array([counts[0], counts[:10].sum()]) / 20000
        np.testing.assert_allclose(got, wanted, rtol=0.05)
    flat = made(count=20000, exponent=0.0, rows=100).read(0, 20000).ids[:, 0]
    counts = np.unique(flat, return_counts=True)[1]
    assert len(counts) == 100
    assert 120 < counts.min() < counts.max() < 290


def test_the_planted_model_is_calibrated():
    labels = made().read(0, 3000).labels
    chances = made().chances(0, 3000)
    assert 0.75 < scoring.score(labels, chances)["auc"] < 0.95
    buckets = np.digitize(chances, [0.2, 0.4, 0.6, 0.8])
    rates, wanted = (
        [values[buckets == bucket].mean() for bucket in range(5)] for values in (labels, chances)
    )
    np.testing.assert_allclose(rates, wanted, atol=0.05)


def reference_logits(model, dense, ids):
    """DLRM in numpy, one sample at a time, from the weights of a model of mixed widths."""
    dense_layers = [v.numpy() for v in model.dense.weights]
    names = [v.path for v in model.dense.weights]
    assert len([name for name in names if name.endswith("bias")]) == 5
    layers = model.dense.layers
    mlp = [layer for layer in layers if isinstance(layer, keras.layers.Dense) and layer.use_bias]
    project = {
        layer.input.name: layer.kernel.numpy()
        for layer in layers
        if isinstance(layer, keras.layers.Dense) and not layer.use_bias
    }
    assert len(dense_layers) == 2 * len(mlp) + len(project)
    weights = [(layer.kernel.numpy(), layer.bias.numpy()) for layer in mlp]
    logits = []
    for sample, sample_ids in zip(dense, ids, strict=True):
        x = sample
        for kernel, bias in weights[:2]:
            x = np.maximum(x @ kernel + bias, 0)
        vectors, at = [x], 0
        for i, (table, hotness) in enumerate(zip(model.tables, model.sizes.hotness, strict=True)):
            bag = sample_ids[at : at + hotness]
            at += hotness
            vector = sum(table.lookup([key], insert=False).numpy()[0] for key in bag)
            vectors.append(vector @ project.get(f"pooled_{i}", np.eye(len(vector))))
        pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        x = np.concatenate([x, pairs])
        for kernel, bias in weights[2:-1]:
            x = np.maximum(x @ kernel + bias, 0)
        logits.append((x @ weights[-1][0] + weights[-1][1])[0])
    return np.array(logits)


def test_the_model_is_dlrm():
    keras.utils.set_random_seed(0)
    sizes = dlrm_model.Sizes(hotness=(2, 1, 3), dim=4, dims=(4, 6, 2), bottom=(5,), top=(7, 3))
    model = dlrm_model.Dlrm(sizes, keras.optimizers.SGD(0.1), [0.5, 0.5, 0.5], seed=1)
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(8, 13)).astype(np.float32)
    ids = rng.integers(-5, 5, (8, 6)).astype(np.int32)
    got = model.logits(tf.constant(dense), tf.constant(ids), training=False)
    np.testing.assert_allclose(got, reference_logits(model, dense, ids), rtol=1e-4, atol=1e-5)
    assert sum(len(table) for table in model.tables) == 0
    labels = tf.constant(rng.integers(0, 2, 8), tf.float32)
    losses = [float(model.step(dense, ids, labels)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    first = tf.nn.sigmoid_cross_entropy_with_logits(labels, got)
    assert losses[0] == pytest.approx(float(tf.reduce_mean(first)), rel=1e-5)
    distinct = [len(np.unique(ids[:, columns])) for columns in ([0, 1], [2], [3, 4, 5])]
    assert [len(table) for table in model.tables] == distinct


def test_the_learning_rate_of_mlperf():
    rate = dlrm_model.WarmUpThenDecay(2.0, warm_up=4, decay_start=10, decay_steps=5)
    got = [float(rate(step)) for step in range(17)]
    falling = [2.0 * (1 - done / 5) ** 2 for done in range(1, 5)]
    wanted = [0.5, 1.0, 1.5, *[2.0] * 8, *falling, 0.0, 0.0]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    flat = dlrm_model.WarmUpThenDecay(2.0, warm_up=0, decay_start=0, decay_steps=0)
    assert [float(flat(step)) for step in (0, 1000)] == [2.0, 2.0]
    again = dlrm_model.WarmUpThenDecay.from_config(rate.get_config())
    assert float(again(1)) == 1.0


def test_scores_of_all_ranks():
    """Two ranks with shares of different sizes."""
    rng = np.random.default_rng(0)
    labels, chances = rng.integers(0, 2, 50).astype(np.float32), rng.random(50).astype(np.float32)
    others = {"scoring/labels": labels[30:], "scoring/probabilities": chances[30:]}

    def allgather(tensor, name):
        return tf.concat([tensor, others[name]], 0)

    rank_comms = [SimpleNamespace(rank=rank, allgather=allgather) for rank in range(2)]
    got = [scoring.score_of_all(comm, labels[:30], chances[:30]) for comm in rank_comms]
    assert got == [scoring.score(labels, chances), None]


def event(name, thread, start, end, facts=None):
    return step_phases.Event(name, thread, start * 1e6, end * 1e6, facts or {})


def flight(name, kind, start, end, step=1):
    facts = {"step_id": step, "name": name, "kernel_type": kind}
    return [
        event("ExecutorState::ProcessAsync::Start", 1, start, start + 0.1, facts),
        event("ExecutorState::ProcessAsync::Done", 9, end, end + 5, facts),
    ]


def test_a_step_is_divided_among_its_phases():
    events = [
        event("ExecutorState::Process", 1, 1, 20),
        event("input", 0, 0, 2),
        event("forward/x:MatMul", 1, 1, 5),
        event("forward/DynembRoute:DynembRoute", 2, 3, 7),
        *flight("forward/dynemb_keys", "HorovodAlltoall", 6, 15),
        event("gradient_tape/forward/x:Mul", 1, 10, 12),
        event("EagerExecute: no:operator", 0, 0, 30),
        event("optimizer/apply:DynembApplyGradients", 1, 16, 18),
        event("input", 0, 14, 17),
    ]
    got = step_phases.shares(step_phases.spans_of(events), 0.0, 25e6)
    assert got.alone == {
        "input": 2,  # before 1, and from 15 to 16
        "dense forward": 3,  # of 4, of which 2 are shared with "route keys"
        "route keys": 3,
        "exchange keys": 6,  # 7 to 15, except 2 in which the backward pass ran
        "dense backward": 2,
        "update rows": 2,
        step_phases.EXECUTOR: 2,
        step_phases.REST: 5,
    }
    assert sum(got.alone.values()) == 25
    hidden = {"input": 5, "dense forward": 4, "route keys": 4, "exchange keys": 9}
    assert got.in_all == got.alone | hidden
    # Only the work within the times counts.
    part = step_phases.shares(step_phases.spans_of(events), 8e6, 11e6)
    assert part.alone == {"exchange keys": 2, "dense backward": 1}


def test_nested_operators():
    events = [
        event("forward/call:PartitionedCall", 1, 0, 10),
        event("forward/DynembRoute:DynembRoute", 1, 2, 4),
        event("gradient_tape/x:Mul", 1, 4, 9),
        event("other:Add", 1, 12, 13),
    ]
    spans = sorted(step_phases.spans_of(events), key=lambda span: span.start)
    assert [(span.phase, span.start / 1e6, span.end / 1e6) for span in spans] == [
        ("dense forward", 0, 2),
        ("route keys", 2, 4),
        ("dense backward", 4, 9),
        ("dense forward", 9, 10),
        ("other operators", 12, 13),
    ]


def test_phases_by_name():
    cases = {
        ("forward/dynemb_vectors", "HorovodAlltoall"): "exchange vectors",
        ("gradient_tape/forward/dynemb_gradients", "HorovodAlltoall"): "exchange gradients",
        ("x/dynemb_gradients/float32", "HorovodGroupedAllreduce"): step_phases.ALLREDUCE,
        ("forward/dynemb_keys_1", "HorovodAlltoall"): "exchange keys",
        ("dynemb_ahead_vectors", "HorovodAlltoall"): "exchange vectors",
        ("something", "HorovodAlltoall"): "other operators",
        ("forward/y", "MatMul"): "dense forward",
        ("optimizer/y", "ResourceApplyAdagrad"): "dense optimizer",
    }
    assert {case: step_phases.phase_of(*case) for case in cases} == cases
    assert set(cases.values()) <= set(step_phases.PHASES)


SMALL = ["--rows-at-most", "200", "--dim", "4", "--bottom", "8", "--top", "16"]


def test_dlrm_on_synthetic_clicks(tmp_path):
    few = ["--samples", "4096", "--test-samples", "1001", "--batch-size", "256"]
    few += ["--hotness", *"32121111111111111111111111"]
    more = ["--phases", "--profile", "profile", "--dump", "tables", "--key-type", "int32"]
    more += ["--dims", *(["4"] * 25), "6", "--zipf", "1.3", "--learning-rate", "0.05"]
    script = str(EXAMPLES / "dlrm.py")
    printed = run_python([script, *SMALL, *few, *more, "--epochs", "3"], tmp_path)
    aucs = [float(auc) for auc in re.findall(r"^epoch.*AUC ([0-9.]+)", printed, re.MULTILINE)]
    best = float(re.search(r"planted model's own: AUC ([0-9.]+)", printed).group(1))
    assert len(aucs) == 3
    assert 0.62 < max(aucs) < best < 0.95
    assert "1,001 test samples" in printed
    assert re.search(r"^median: [0-9,]+ samples/s", printed, re.MULTILINE)

    lines = printed.partition("phase of a step")[2].partition("the step, traced")[0].splitlines()
    alone = {line[:34].strip(): float(line[34:43]) for line in lines[1:]}
    total = float(re.search(r"the step, traced +([0-9.]+)", printed).group(1))
    assert sum(alone.values()) == pytest.approx(total, abs=0.1)
    assert {"look up rows", "sum gradients and update rows", "dense backward"} < alone.keys()
    assert "exchange keys" not in alone
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1

    reader = de.serving.Reader(tmp_path / "tables")
    assert set(reader.tables) == {f"feature_{i}" for i in range(26)}
    assert reader.dimension("feature_25") == 6
    rows = sum(reader.size(table) for table in reader.tables)
    assert f"rows in the tables of each rank: {rows:,}\n" in printed
    assert reader.key_type("feature_0") == "int32"


def test_dlrm_on_files_of_clicks(tmp_path, clicks):
    write(tmp_path / "train_data.bin", "40i", clicks.labels, clicks.counts, clicks.single)
    write(tmp_path / "test_data.bin", "40i", clicks.labels, clicks.counts, clicks.single)
    data = ["--data", ".", "--layout", "reference", "--batch-size", "16"]
    others = ["--optimizer", "sgd", "--warm-up-steps", "2", "--log-every", "1"]
    printed = run_python([str(EXAMPLES / "dlrm.py"), *SMALL, *data, *others], tmp_path)
    assert "26 tables, 26 ids a sample" in printed
    assert "; 60 test samples" in printed
    assert "planted" not in printed
