"""A training step with tables on a GPU: what TensorFlow's graph copies from the GPU to the host.

Such a copy waits for all work of the GPU before it, and the host then gives it no work meanwhile.
"""

import gpu
import keras
import numpy as np
import pytest
import tensorflow as tf
from device_graphs import copied_to_the_host, made_elsewhere, nodes_of, operators

import tf_dynemb as de
from tf_dynemb import layers

pytestmark = pytest.mark.skipif(not gpu.ON, reason="tables are not on a GPU")
DIM = 4
KINDS = ["dense", "one_id", "ragged", "int32_splits", "sparse"]


def on(device, value):
    with tf.device(device):
        return tf.identity(value)


def ids_of(kind):
    """Ids in GPU memory; their bags are on the host, as input pipelines have them."""
    keys = on("GPU:0", tf.constant(np.arange(12), tf.int64))
    if kind == "dense":
        return on("GPU:0", tf.constant(np.arange(12).reshape(4, 3), tf.int64))
    if kind == "one_id":
        return on("GPU:0", tf.constant(np.arange(4), tf.int64))
    with tf.device("CPU"):
        if kind == "sparse":
            indices = tf.constant([[b, c] for b in range(4) for c in range(3)], tf.int64)
            return tf.SparseTensor(indices, keys, tf.constant([4, 3], tf.int64))
        dtype = tf.int32 if kind == "int32_splits" else tf.int64
        return tf.RaggedTensor.from_row_splits(
            keys, tf.constant([0, 2, 2, 9, 12], dtype), validate=False
        )


def spec_of(ids, is_static):
    """Static: all sizes are known when the function is traced."""
    spec = tf.type_spec_from_value(ids)
    if is_static:
        return spec
    if isinstance(ids, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], ids.dtype, 1, ids.row_splits.dtype)
    if isinstance(ids, tf.SparseTensor):
        return tf.SparseTensorSpec([None, None], ids.dtype)
    return tf.TensorSpec([None] * ids.shape.rank, ids.dtype)


@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_copies_nothing_to_the_host(kind, is_static):
    tables = [de.DynamicVariable(DIM, name=f"{kind}_{n}", var_type="hbm") for n in range(3)]
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
    ids, upstream = ids_of(kind), on("GPU:0", tf.ones([4, DIM]))
    optimizer.build(tables)
    spec = spec_of(ids, is_static)

    @tf.function(input_signature=[spec, tf.TensorSpec([None, DIM])])
    def step(ids, upstream):
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(tables, [ids] * 3, combiners=["sum", "mean", "sqrtn"])
        gradients = tape.gradient(pooled, tables, output_gradients=[upstream] * 3)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        return pooled

    nodes = nodes_of(lambda: step(ids, upstream))
    assert "DynembApplyPooledGradients" in operators(nodes)
    assert operators(nodes).count("DynembLookupSparse") == 1
    assert copied_to_the_host(nodes) == []
    assert made_elsewhere(step.get_concrete_function()) == []


@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_copies_nothing_to_the_host(kind, is_static):
    ids = ids_of(kind)
    combiner = None if kind == "one_id" else "mean"
    layer = layers.Embedding(DIM, combiner=combiner, name=f"layer_{kind}", var_type="hbm")
    call = tf.function(lambda ids: layer(ids, training=True), autograph=False)
    call = call.get_concrete_function(spec_of(ids, is_static))
    nodes = nodes_of(lambda: call(ids))
    assert "DynembLookupSparse" in operators(nodes)
    assert copied_to_the_host(nodes) == []
    assert made_elsewhere(call) == []
