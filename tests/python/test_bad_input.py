"""Invalid input raises an exception that names the argument, and changes nothing."""

import os
import pathlib
import random
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import _ops

IDS = tf.constant([[1, 2], [3, 4]], tf.int64)
SPARSE = tf.SparseTensor([[0, 0], [1, 0]], tf.constant([1, 2], tf.int64), [2, 2])
RAGGED = tf.ragged.constant([[1], [2, 3]], dtype=tf.int64)


def table(**options):
    made = de.DynamicVariable(2, "ones", **options)
    made.lookup([1, 2, 3])
    return made


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"dimension": 0}, ValueError, "dimension.*0"),
        ({"dimension": -3}, ValueError, "dimension.*-3"),
        ({"dimension": 2.5}, TypeError, "dimension.*2.5"),
        ({"dimension": True}, TypeError, "dimension"),
        ({"dimension": None}, TypeError, "dimension"),
        ({"initializer": "no_such"}, ValueError, "no_such"),
        ({"initializer": keras.initializers.Orthogonal()}, ValueError, "Orthogonal"),
        ({"initializer": lambda shape, dtype=None: 0}, ValueError, "initializer"),
        ({"initializer": float("nan")}, ValueError, "nan"),
        ({"initializer": "inf"}, ValueError, "inf"),
        ({"initializer": [1.0, 2.0, 3.0]}, ValueError, "2 columns.*3"),
        ({"initializer": [1.0, [2.0, 1.0]]}, ValueError, "nested"),
        ({"initializer": keras.initializers.RandomUniform(1, 0)}, ValueError, "minval"),
        ({"initializer": keras.initializers.RandomNormal(0, -1)}, ValueError, "stddev"),
        ({"var_type": "vram"}, ValueError, "var_type.*vram"),
        ({"name": ""}, TypeError, "name"),
        ({"name": 3}, TypeError, "name.*3"),
        ({"constraint": "unit"}, TypeError, "constraint.*unit"),
        ({"key_type": tf.int16}, TypeError, "key_type.*int16"),
        ({"key_type": "text"}, TypeError, "key_type.*text"),
        ({"dtype": tf.float64}, TypeError, "dtype.*float64"),
        ({"mode": "everywhere"}, ValueError, "mode.*everywhere"),
        ({"mode": "localized:x"}, ValueError, "mode.*localized:x"),
        ({"mode": "localized:1"}, ValueError, "mode.*rank 1"),
        ({"no_such_option": 3}, ValueError, "no_such_option=3"),
        ({"init_capacity": 0}, ValueError, "init_capacity.*0"),
        ({"init_capacity": "many"}, ValueError, "init_capacity.*many"),
        ({"max_capacity": 0}, ValueError, "max_capacity.*0"),
        ({"max_capacity": -1}, ValueError, "max_capacity.*-1"),
        ({"max_capacity": 2**63}, ValueError, "max_capacity"),
        ({"init_capacity": 9, "max_capacity": 8}, ValueError, "init_capacity=9.*max_capacity=8"),
        ({"max_load_factor": 0.0}, ValueError, "max_load_factor.*0"),
        ({"max_load_factor": 0.049}, ValueError, "max_load_factor.*0.049"),
        ({"max_load_factor": 0.951}, ValueError, "max_load_factor.*0.951"),
        ({"max_load_factor": 1}, ValueError, "max_load_factor.*got 1"),
        ({"evict_strategy": "random"}, ValueError, "evict_strategy.*random"),
        ({"seed": "x"}, ValueError, "seed.*x"),
        ({"stochastic_rounding": 1}, ValueError, "stochastic_rounding"),
        ({"max_hbm_for_vectors": -1}, ValueError, "max_hbm_for_vectors.*-1"),
        ({"max_hbm_for_vectors": float("nan")}, ValueError, "max_hbm_for_vectors.*nan"),
        ({"ttl": 36.5}, ValueError, "ttl must be .*36.5"),
        ({"admission": "bloom"}, ValueError, "admission.*bloom"),
    ],
)
def test_invalid_arguments_of_a_table(arguments, error, names):
    with pytest.raises(error, match=names):
        de.DynamicVariable(**{"dimension": 2, **arguments})


def test_options_of_sok_scripts_are_accepted():
    made = de.DynamicVariable(
        dimension=2,
        var_type="hybrid",
        initializer="13",
        init_capacity=1024,
        max_capacity=3000,
        max_hbm_for_vectors=1,
        max_load_factor=0.75,
        evict_strategy="kLru",
    )
    assert made.options.max_capacity == 3000


@pytest.mark.parametrize("load", [0.05, 0.5, 0.95])
def test_load_factors(load):
    table = de.DynamicVariable(dimension=1, max_load_factor=load)
    table.lookup(tf.range(2000, dtype=tf.int64))
    assert len(table) == 2000


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda t: t.lookup([1.5]), TypeError, "ids"),
        (lambda t: t.lookup(tf.constant([1.0])), TypeError, "ids.*float32"),
        (lambda t: t.lookup(["a"]), TypeError, "ids"),
        (lambda t: t.lookup([[1], [1, 2]]), (TypeError, ValueError), "ids"),
        (lambda t: t.lookup(tf.constant([1], tf.uint64)), TypeError, "uint64.*int64"),
        (lambda t: t.lookup([2**63]), ValueError, str(2**63)),
        (lambda t: t.lookup(SPARSE), TypeError, "ids.*SparseTensor"),
        (lambda t: t.lookup([1], insert=False, default_value=[1.0]), ValueError, "default_value"),
        (lambda t: t.gather_nd([[1, 2]]), ValueError, "indices"),
        (lambda t: t.upsert([9], [[1.0]]), ValueError, "values"),
        (lambda t: t.upsert([9, 8], [[1.0, 2.0]]), ValueError, "values"),
        (lambda t: t.upsert([9], [[1, 2]]), TypeError, "values.*int32"),
        (lambda t: t.scatter_add([[1.0, 2.0]]), TypeError, "sparse_delta"),
        (lambda t: t.erase([1.0]), TypeError, "keys"),
        (lambda t: t.contains("x"), TypeError, "keys"),
        (lambda t: de.assign(t, [1], [[1.0, 2.0, 3.0]]), ValueError, "values"),
        (lambda t: de.assign(tf.Variable([1.0]), [1], [[1.0]]), TypeError, "var"),
        (lambda t: de.export([t]), TypeError, "var"),
        (lambda t: de.init(3), TypeError, "comm_tool must be a string, got 3"),
        (lambda t: de.Variable([1.0], mode="both"), ValueError, "mode.*both"),
        (lambda t: de.lookup_sparse([], []), ValueError, "params"),
        (lambda t: de.lookup_sparse(np.ones((2, 2)), IDS), TypeError, "params"),
        (lambda t: de.lookup_sparse(tf.Variable([1.0]), IDS), ValueError, "params"),
        (lambda t: de.lookup_sparse(tf.Variable([[1]]), IDS), ValueError, "params.*int32"),
        (lambda t: de.lookup_sparse([t, t], [IDS]), ValueError, r"sp_ids has 1.*params has 2"),
        (lambda t: de.lookup_sparse([t], IDS), TypeError, "sp_ids"),
        (lambda t: de.lookup_sparse([t], [None]), TypeError, "sp_ids"),
        (lambda t: de.lookup_sparse([t], [IDS], [None, None]), ValueError, "sp_weights"),
        (lambda t: de.lookup_sparse(t, IDS, combiners="avg"), ValueError, "combiner.*avg"),
        (
            lambda t: de.lookup_sparse([t], [IDS], combiners=["sum"] * 2),
            ValueError,
            "combiners has 2",
        ),
        (lambda t: de.lookup_sparse(t, IDS, combiners=7), TypeError, "combiners.*7"),
        (lambda t: de.lookup_sparse(t, IDS, insert=1), TypeError, "insert"),
        (lambda t: de.lookup_sparse(t, tf.constant(5)), ValueError, "sp_ids"),
        (lambda t: de.lookup_sparse(t, tf.zeros([2, 2, 2], tf.int64)), ValueError, "sp_ids"),
        (lambda t: de.lookup_sparse(t, tf.zeros([2, 2])), TypeError, "sp_ids.*float32"),
        (lambda t: de.lookup_sparse(t, IDS, tf.zeros([2, 3])), ValueError, "sp_weights"),
        (lambda t: de.lookup_sparse(t, IDS, IDS), TypeError, "sp_weights.*int64"),
        (lambda t: de.lookup_sparse(t, IDS, SPARSE), TypeError, "sp_weights.*SparseTensor"),
        (lambda t: de.lookup_sparse(t, SPARSE, IDS), TypeError, "sp_weights"),
        (lambda t: de.lookup_sparse(t, RAGGED, IDS), TypeError, "sp_weights"),
        (
            lambda t: de.lookup_sparse(t, RAGGED, tf.ragged.constant([[1.0, 2.0], [3.0]])),
            ValueError,
            "sp_weights",
        ),
        (
            lambda t: de.lookup_sparse(t, SPARSE, tf.SparseTensor([[0, 0]], [1.0], [2, 2])),
            ValueError,
            "sp_weights",
        ),
        (
            lambda t: de.lookup_sparse(t, tf.ragged.constant([[[1]], [[2]]], dtype=tf.int64)),
            ValueError,
            "sp_ids",
        ),
        (lambda t: de.OptimizerWrapper(None), TypeError, "keras_optimizer"),
        (lambda t: de.OptimizerWrapper(de.OptimizerWrapper("sgd")), TypeError, "OptimizerWrapper"),
        (lambda t: wrapped().apply_gradients([(tf.ones([1, 2]), t)]), TypeError, "IndexedSlices"),
        (
            lambda t: wrapped().apply_gradients([(tf.IndexedSlices(tf.ones([1, 3]), [1]), t)]),
            ValueError,
            "gradient.*values",
        ),
        (lambda t: wrapped().apply_gradients([(None, t)]), ValueError, "No gradients"),
        (lambda t: wrapped().apply([None], [t, t]), ValueError, "1 gradients for 2"),
        (
            lambda t: wrapped(gradient_accumulation_steps=2, global_clipnorm=1.0).build([t]),
            ValueError,
            "gradient_accumulation_steps",
        ),
        (lambda t: wrapped().minimize(tf.constant(1.0), [t]), ValueError, "tape"),
        (lambda t: de.RowwiseAdagrad(initial_accumulator_value=-1.0), ValueError, "-1.0"),
        (lambda t: de.layers.Embedding(0), ValueError, "dim.*0"),
        (lambda t: de.layers.Embedding(2, no_such=1), ValueError, "no_such=1"),
        (lambda t: de.layers.Embedding(2, combiner="avg"), ValueError, "combiner.*avg"),
        (lambda t: de.layers.Embedding(2, padding_id=1.5), TypeError, "padding_id.*1.5"),
        (lambda t: de.layers.Embedding(2, padding_id=2**64), ValueError, "padding_id"),
        (lambda t: de.layers.Embedding(2, default_vector=[1.0] * 3), ValueError, "default_vector"),
        (lambda t: de.layers.Embedding(2)(SPARSE), TypeError, "combiner"),
        (lambda t: de.layers.EmbeddingBag(2, None), ValueError, "combiner.*None"),
        (lambda t: de.layers.EmbeddingBag(2)(tf.constant([1])), ValueError, "ids"),
        (lambda t: de.layers.MultiTableEmbedding(2, 0), ValueError, "tables"),
        (lambda t: de.layers.MultiTableEmbedding(2, "x"), TypeError, "tables.*x"),
        (lambda t: de.layers.MultiTableEmbedding(2, [{"bad": 1}]), ValueError, "bad=1"),
        (lambda t: de.layers.MultiTableEmbedding(2, 2, [0, 2]), ValueError, "feature_tables.*2"),
        (lambda t: de.layers.MultiTableEmbedding(2, 3)(IDS), ValueError, r"\[batch, 3\]"),
    ],
)
def test_invalid_calls(call, error, names):
    victim = table()
    before = de.export(victim)
    with pytest.raises(error, match=names):
        call(victim)
    assert [t.numpy().tolist() for t in de.export(victim)] == [t.numpy().tolist() for t in before]


def wrapped(**options):
    return de.OptimizerWrapper(keras.optimizers.SGD(0.1, **options))


def test_invalid_ids_fail_while_tracing():
    small = de.DynamicVariable(2, key_type=tf.int32)
    with pytest.raises(TypeError, match=r"int64.*int32"):
        tf.function(lambda ids: de.lookup_sparse(small, ids)).get_concrete_function(
            tf.TensorSpec([None, 2], tf.int64)
        )


def test_inconsistent_lengths_fail_at_run_time():
    small = table()

    @tf.function(
        input_signature=[
            tf.RaggedTensorSpec([None, None], tf.int64),
            tf.RaggedTensorSpec([None, None], tf.float32),
        ]
    )
    def look(ids, weights):
        return de.lookup_sparse(small, ids, weights)

    with pytest.raises(tf.errors.InvalidArgumentError):
        look(RAGGED, tf.ragged.constant([[1.0], [2.0]]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        de.lookup_sparse(small, tf.SparseTensor([[7, 0]], tf.constant([9], tf.int64), [2, 2]))
    assert len(small) == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_gradients_are_applied_and_counted(value):
    small = table()
    grad = tf.IndexedSlices(tf.constant([[value, 1.0]]), [1])
    wrapped().apply_gradients([(grad, small)])
    got = small.lookup([1]).numpy()[0]
    assert not np.isfinite(got[0])
    assert got[1] == pytest.approx(0.9)
    assert any(count == 1 for name, count in small.stats().items() if "finite" in name)


def test_tensorflow_version_is_checked():
    assert _ops.library_path(tf.__version__).exists()
    for version in ("2.17.0", "3.21.0"):
        with pytest.raises(ImportError, match=rf"{version} is installed: .*tensorflow-cpu"):
            _ops.library_path(version)


def test_a_library_for_another_tensorflow_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_ops, "FOLDER", tmp_path)
    with pytest.raises(ImportError, match=r"TensorFlow 2\.20\.0 is installed.* is not built"):
        _ops.library_path("2.20.0")
    (tmp_path / "_dynemb_ops_tf2.21.so").touch()
    with pytest.raises(ImportError, match=r"has operators for TensorFlow 2\.21: install"):
        _ops.library_path("2.20.0")


def test_import_changes_nothing():
    code = """
import tensorflow as tf, keras, sys, os
def snapshot():
    places = [tf, tf.Variable, tf.TensorShape, keras, keras.Variable, keras.optimizers,
              keras.layers, keras.layers.Layer, keras.optimizers.Optimizer, keras.Model]
    return [{k: id(v) for k, v in vars(p).items() if not k.startswith('_abc')} for p in places]
before, environment = snapshot(), dict(os.environ)
import tf_dynemb
assert snapshot() == before
assert dict(os.environ) == environment
assert 'horovod' not in sys.modules
assert all(hasattr(tf_dynemb, name) for name in tf_dynemb.__all__)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def invalid_values(table, small):
    sparse = tf.SparseTensor
    ragged = tf.RaggedTensor.from_row_splits
    one = tf.constant([1], tf.int64)
    return [
        *(None, 0, -1, 2, 2.5, float("nan"), "x", "sum", "mean", "", b"z", [], [[]], {}, (1, 2)),
        *(True, 2**63, -(2**63), 2**70, [1, 2, 3], [[1, 2], [3]], [None], [1.5], object(), int),
        *(tf.int64, tf.float32, lambda *a, **k: 1, table, small, tf.Variable(1.0)),
        *(np.zeros((0, 2)), np.zeros((2, 0), np.int64), np.array([[1, 2]]), np.array(["a"])),
        *(np.array(5), np.ones((2, 2, 2), np.int64), np.full((2,), np.iinfo(np.int64).min)),
        *(tf.constant([1, 2]), tf.constant([[1, 2]], tf.int64), tf.constant("s"), one),
        *(tf.constant([True]), tf.constant(1.0), tf.zeros([0], tf.int64), tf.ones([2, 2])),
        *(tf.constant([1], tf.uint64), tf.ones([2, 3], tf.float16), tf.constant([[1j]])),
        *(sparse([[0, 0]], one, [1, 1]), sparse([[9, 9]], one, [1, 1])),
        *(sparse([[-1, 0]], one, [2, 2]), sparse([[0, 0], [0, 0]], [1.0, 2.0], [2, 2])),
        sparse(tf.zeros([0, 1], tf.int64), tf.zeros([0], tf.int64), [0]),
        *(ragged(one, [0, 5, 1], validate=False), ragged(one, [0, -1, 1], validate=False)),
        *(ragged(tf.constant([1, 2], tf.int64), [0, 2]), ragged(tf.ones([2, 2]), [0, 2])),
        tf.IndexedSlices(tf.ones([1, 2]), one),
        tf.IndexedSlices(tf.ones([3, 2]), one),
        tf.IndexedSlices(tf.ones([2]), tf.constant([[1]], tf.int64)),
        *(tf.Variable([[1.0, 2.0]]), keras.optimizers.SGD(), keras.initializers.Ones()),
    ]


def malformed_calls(rng, table, small):
    """Returns functions that each call a public function with invalid arguments."""
    nonsense = invalid_values(table, small)
    wrapper = de.OptimizerWrapper(keras.optimizers.Adam(0.1))
    options = ["initializer", "var_type", "name", "constraint", "trainable", "key_type", "dtype"]
    options += ["mode", "max_capacity", "init_capacity", "seed", "evict_strategy", "what"]
    layers = de.layers

    def junk():
        return rng.choice(nonsense)

    def maybe(value=None):
        return rng.choice([value, junk()])

    def junk_list():
        return [junk() for _ in range(rng.randrange(4))]

    def victim():
        return rng.choice([table, small])

    def method(*names):
        return getattr(victim(), rng.choice(names))

    return {
        "DynamicVariable": lambda: de.DynamicVariable(
            maybe(2), **{rng.choice(options): junk() for _ in range(2)}
        ),
        "Variable": lambda: de.Variable(*junk_list(), mode=junk()),
        "lookup_sparse": lambda: de.lookup_sparse(victim(), junk(), maybe(), maybe()),
        "lookup_sparse of lists": lambda: de.lookup_sparse(
            [victim(), victim()], [junk(), junk()], maybe([junk(), None]), junk_list()
        ),
        "assign": lambda: de.assign(victim(), junk(), junk()),
        "export": lambda: de.export(junk()),
        "filter_variables": lambda: de.filter_variables(junk()),
        "init": lambda: de.init(junk()),
        "OptimizerWrapper": lambda: de.OptimizerWrapper(junk()),
        "RowwiseAdagrad": lambda: de.RowwiseAdagrad(junk(), junk(), epsilon=junk()),
        "apply_gradients": lambda: wrapper.apply_gradients([(junk(), victim())]),
        "lookup": lambda: victim().lookup(junk(), default_value=maybe()),
        "scatter": lambda: method("scatter_add", "scatter_sub", "scatter_update")(junk()),
        "erase": lambda: method("erase", "contains", "gather_nd", "sparse_read")(junk()),
        "upsert": lambda: victim().upsert(junk(), junk()),
        "Embedding": lambda: layers.Embedding(maybe(2), combiner=maybe(), padding_id=maybe())(
            junk(), training=True
        ),
        "EmbeddingBag": lambda: layers.EmbeddingBag(2, default_vector=maybe())(
            junk(), weights=maybe(), training=True
        ),
        "MultiTableEmbedding": lambda: layers.MultiTableEmbedding(2, maybe(2), maybe())(
            junk(), table_ids=maybe(), training=True
        ),
    }


def call_all_200_times(seed):
    rng = random.Random(seed)
    table = de.DynamicVariable(2, "ones")
    small = de.DynamicVariable(3, "ones", key_type=tf.int32, dtype=tf.float16, max_capacity=16)
    raised = 0
    for name, call in malformed_calls(rng, table, small).items():
        for _ in range(200):
            try:
                call()
            except Exception as error:
                raised += 1
                if isinstance(error, (MemoryError, SystemError)):
                    sys.exit(f"{name}: {error!r}")
    for t in (table, small):
        t.clear()
        assert (t.lookup([1]).numpy() == 1).all()
        assert len(t) == 1
    print("alive", raised)


def run_python(*arguments):
    path = pathlib.Path(de.__file__).parents[1]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_malformed_calls_never_crash():
    done = run_python(__file__, "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("alive")
    assert int(done.stdout.split()[1]) > 1800


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    call_all_200_times(int(sys.argv[1]))
