"""Loaded models whose tables are in GPU memory: on the fake GPU (tests/fake_gpu), or a real one."""

import gpu
import keras
import numpy as np
import pytest
import tensorflow as tf
from device_graphs import made_elsewhere, nodes_of
from tensorflow.python.saved_model import loader_impl
from test_saved_models import assert_same_bits

import tf_dynemb as de
from tf_dynemb import _ops, layers
from tf_dynemb.parallel import placement
from tf_dynemb.serve.loaded_model import LoadedModel

on_gpu = pytest.mark.skipif(not gpu.ON, reason="TensorFlow sees no GPU")
GB = 2.0**-30
KEYS = np.arange(200)
LIMITS = [0, 1000 * GB, 16]


class Tables(tf.Module):
    """Tables of several types, widths and ways to read keys without a row; each kind of ids."""

    OPTIONS = (
        {"dimension": 4},
        {"dimension": 8, "initializer": "normal", "key_type": tf.int32},
        {"dimension": 3, "dtype": tf.float16, "initializer": 0.5},
        {"dimension": 5},
        {"dimension": 4, "admission": de.Frequency(2, unadmitted="skip")},
        {"dimension": 4, "admission": de.Frequency(2, unadmitted="zeros")},
    )
    COMBINERS = ("mean", "sum", "max", "sqrtn", "mean", "sum")

    def __init__(self):
        super().__init__()
        self.tables = [
            de.DynamicVariable(name=f"table_{n}", var_type="host", **options)
            for n, options in enumerate(self.OPTIONS)
        ]
        self.tables[3].default_vector = [1.0, 2.0, 3.0, 4.0, 5.0]
        self.weight = tf.Variable(2.0)

    def change(self, seed):
        rng = np.random.default_rng(seed)
        for table in self.tables:
            known = KEYS.astype(table.key_type.as_numpy_dtype)
            keys = rng.choice(known, 120, replace=False)
            table.upsert(keys, rng.normal(size=[120, table.dimension]))
            table.erase(rng.choice(known, 10, replace=False))
        self.weight.assign_add(1.0)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 3], tf.int64),
            tf.RaggedTensorSpec([None, None], tf.int64),
            tf.SparseTensorSpec([None, None], tf.int64),
        ]
    )
    def serve(self, dense, ragged, sparse):
        outputs = {}
        for name, ids in (("dense", dense), ("ragged", ragged), ("sparse", sparse)):
            typed = [tf.cast(ids, table.key_type) for table in self.tables]
            pooled = de.lookup_sparse(self.tables, typed, combiners=list(self.COMBINERS))
            outputs |= {f"{name}_{n}": vectors for n, vectors in enumerate(pooled)}
        for n, table in enumerate(self.tables):
            outputs[f"lookup_{n}"] = table.lookup(tf.cast(dense, table.key_type))
        return outputs


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A module with tables, its SavedModel and the dump that this is a link to."""
    folder = tmp_path_factory.mktemp("exported")
    module = Tables()
    module.change(1)
    de.dump(folder / "published", module)
    de.export_saved_model(
        module, folder / "model", "link", folder / "published", signatures=module.serve
    )
    return module, folder


def ids(seed=0):
    rng = np.random.default_rng(seed)
    flat = rng.integers(-5, 230, 90)
    flat[0] = 2**40
    ragged = tf.RaggedTensor.from_row_lengths(flat, rng.multinomial(90, [1 / 20] * 20))
    dense = tf.constant(flat[:60].reshape(20, 3))
    return dense, ragged, ragged.to_sparse()


def served_tables(loaded):
    return [table.served for table in loaded.tables]


def device_rows(loaded):
    found = []
    for table in served_tables(loaded):
        names, values = _ops.library().dynemb_stats(table.handle)
        found.append(int(values[names.numpy().tolist().index(b"device_rows")]))
    return found


@on_gpu
@pytest.mark.parametrize("limit", LIMITS)
def test_same_bits_as_on_the_cpu(exported, limit):
    _, folder = exported
    expected = de.load_saved_model(folder / "model").serve(*ids())
    loaded = de.load_saved_model(folder / "model", "GPU:0", limit)
    for table in served_tables(loaded):
        assert "GPU:0" in table.handle.device
    found = loaded.serve(*ids())
    assert found.keys() == expected.keys()
    for name in found:
        assert_same_bits(found[name], expected[name])
    rows = device_rows(loaded)
    assert all(not each if limit == 0 else each > 0 for each in rows)
    if limit == LIMITS[-1]:
        assert rows[0] >= 110


@on_gpu
@pytest.mark.parametrize("limit", LIMITS)
def test_snapshots_are_applied(tmp_path, limit):
    module = Tables()
    module.change(1)
    de.dump(tmp_path / "published", module)
    de.export_saved_model(
        module, tmp_path / "model", "link", tmp_path / "published", signatures=module.serve
    )
    loaded = de.load_saved_model(tmp_path / "model", "GPU:0", limit)
    on_cpu = de.load_saved_model(tmp_path / "model")
    for seed in range(2, 6):
        module.change(seed)
        if seed == 4:
            de.dump(tmp_path / "published", module, overwrite=True)
        else:
            de.incremental_dump(tmp_path / "published", module)
        # Both are one model, whose tables change at once.
        apply = loaded.signatures["apply_delta"]
        assert int(apply(path=tf.constant(str(tmp_path / "published")))["applied"]) == 1
        found, expected = loaded.serve(*ids(seed)), on_cpu.serve(*ids(seed))
        for name in found:
            assert_same_bits(found[name], expected[name])
    state = loaded.signatures["watermark"]()
    assert state["id"] == on_cpu.signatures["watermark"]()["id"]


@on_gpu
def test_bags_of_a_request_are_made_on_the_host(exported):
    """In the exported graph, whatever kernels TensorFlow has."""
    _, folder = exported
    loaded = de.load_saved_model(folder / "model", "GPU:0")
    dense, ragged, sparse = ids()
    with tf.device("GPU:0"):
        dense = tf.identity(dense)
    nodes = nodes_of(lambda: loaded.serve(dense, ragged, sparse))
    assert sum(node.op == "DynembLookupSparse" for node in nodes) == 3
    (function,) = loaded.serve.concrete_functions
    assert made_elsewhere(function) == []


@on_gpu
def test_a_keras_model(tmp_path):
    """Its dense weights follow, too; strings are ids; the server's model has the same outputs."""
    words = keras.Input([2], dtype="string", name="words")
    bags = layers.Embedding(
        4, combiner="mean", name="words_table", var_type="host", hash_strings=True
    )(words)
    model = keras.Model(words, keras.layers.Dense(2)(bags))
    model.compile(de.OptimizerWrapper("adagrad"), "mse")
    given = tf.constant([["a", "b"], ["c", "a"], ["d", ""]])
    model.fit(given, np.ones([3, 2]), verbose=0)
    de.dump(tmp_path / "published", model)
    de.export_saved_model(model, tmp_path / "model", "link", tmp_path / "published")
    served = LoadedModel(tmp_path / "model", device="GPU:0", max_hbm_for_vectors=1)

    def answer():
        outputs, _ = served.signatures[served.default]({"words": (given.numpy(),)})
        (output,) = outputs.values()
        return output

    assert_same_bits(answer(), model.predict_on_batch(given))
    model.fit(given, np.ones([3, 2]), epochs=3, verbose=0)
    de.incremental_dump(tmp_path / "published", model)
    assert served.apply(tmp_path / "published") == 1
    assert_same_bits(answer(), model.predict_on_batch(given))
    (counters,) = served.stats().values()
    assert counters["hits"] > 0
    assert counters["device_rows"] > 0


@on_gpu
def test_a_loaded_model_is_saved_again(tmp_path, exported):
    """Where its tables are belongs to the process, not to the model."""
    _, folder = exported
    loaded = de.load_saved_model(folder / "model", "GPU:0", 1)
    tf.saved_model.save(loaded, tmp_path / "again", signatures=loaded.signatures)
    again = de.load_saved_model(tmp_path / "again")
    graphs = loader_impl.parse_saved_model(str(tmp_path / "again")).meta_graphs[0]
    assert "GPU" not in str(graphs.object_graph_def)
    assert "max_hbm_bytes" not in str(graphs.graph_def.library)
    name = "lookup_0"
    assert_same_bits(again.serve(*ids())[name], loaded.serve(*ids())[name])


@on_gpu
def test_devices_that_do_not_exist(exported):
    _, folder = exported
    with pytest.raises(ValueError, match=r"no device 'GPU:7': TensorFlow sees .*GPU:0"):
        de.load_saved_model(folder / "model", "GPU:7")


@pytest.mark.parametrize("device", ["TPU:0", "", None, "/job:x", 3])
def test_devices_that_are_none(tmp_path, device):
    with pytest.raises(ValueError, match="device must be 'CPU', or a GPU"):
        de.load_saved_model(tmp_path, device)


@pytest.mark.parametrize("limit", [-1, 2**32, float("nan"), True])
def test_limits_that_are_none(tmp_path, limit):
    with pytest.raises(ValueError, match="max_hbm_for_vectors must be a number of GB"):
        de.load_saved_model(tmp_path, "CPU", limit)


@pytest.mark.skipif(gpu.ON, reason="TensorFlow sees a GPU")
def test_a_machine_without_a_gpu(exported, monkeypatch):
    _, folder = exported
    monkeypatch.setattr(placement, "has_gpu_kernels", lambda: False)
    with pytest.raises(ValueError, match="needs code for a GPU, but this build"):
        de.load_saved_model(folder / "model", "GPU:0")
    monkeypatch.setattr(placement, "has_gpu_kernels", lambda: True)
    with pytest.raises(ValueError, match=r"no device 'GPU:0': TensorFlow sees \[\]"):
        de.load_saved_model(folder / "model", "GPU:0")
    loaded = de.load_saved_model(folder / "model", "CPU")
    expected = tf.saved_model.load(str(folder / "model")).serve(*ids())
    for name, output in loaded.serve(*ids()).items():
        assert_same_bits(output, expected[name])
