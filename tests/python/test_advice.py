"""Errors that say what to do."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de


def test_more_ids_than_a_table_may_hold(tmp_path):
    table = de.DynamicVariable(2, max_capacity=10)
    with pytest.raises(tf.errors.ResourceExhaustedError) as error:
        table.lookup(list(range(100)))
    assert "Raise max_capacity, or pass fewer different ids at a time" in error.value.message
    table = de.DynamicVariable(2, max_capacity=10, evict_strategy="none")
    table.lookup(list(range(10)))
    with pytest.raises(tf.errors.ResourceExhaustedError) as error:
        table.lookup([11])
    assert "or choose an evict_strategy that evicts" in error.value.message
    table = de.DynamicVariable(
        4, var_type="file", file_path=str(tmp_path), max_dram_for_vectors=1e-4
    )
    with pytest.raises(tf.errors.ResourceExhaustedError) as error:
        table.lookup(tf.range(10_000))
    assert "max_dram_for_vectors has no room" in error.value.message
    assert "Raise it, or pass fewer different ids at a time" in error.value.message
    assert "max_capacity" not in error.value.message


def test_a_matrix_as_initializer():
    matrix = keras.initializers.Constant(np.ones((10, 4)))
    with pytest.raises(
        ValueError, match=r"shape \[10, 4\].*tf_dynemb.assign\(table, ids, vectors\)"
    ):
        de.layers.Embedding(4, embeddings_initializer=matrix)


def test_attributes_of_keras_layers():
    layer = de.layers.Embedding(4)
    assert layer.output_dim == 4
    assert layer.embeddings.value is layer.table
    assert not hasattr(layer, "input_dim")
    with pytest.raises(AttributeError, match=r"len\(layer.table\)"):
        layer.input_dim  # noqa: B018


def test_a_table_that_two_losses_train_in_turn():
    """A GAN: the table of both networks has one wrapper, each network another optimizer."""

    def gradient(table):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.lookup([1, 2]) ** 2)
        return tape.gradient(loss, table)

    table = de.DynamicVariable(2, name="shared", initializer="ones")
    first, second = (de.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2))
    for optimizer in (first, second):
        optimizer.apply_gradients([(gradient(table), table)])
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        first.apply_gradients([(gradient(table), table)])
    advice = "step it with one wrapper for all of them, apply_gradients([(gradient, table)])"
    assert advice in error.value.message
    # The advice works: two networks in turn, each with its own optimizer for dense variables.
    shared = de.OptimizerWrapper(keras.optimizers.Adam(0.1))
    networks = [tf.Variable(1.0), tf.Variable(2.0)]
    dense_optimizers = [keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.1)]
    before = table.lookup([1]).numpy()
    for _ in range(3):
        for network, optimizer in zip(networks, dense_optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table.lookup([1, 2]) ** 2) * network
            table_gradient, network_gradient = tape.gradient(loss, [table, network])
            shared.apply_gradients([(table_gradient, table)])
            optimizer.apply_gradients([(network_gradient, network)])
    assert (table.lookup([1]).numpy() < before).all()
    assert [float(network) for network in networks] < [1.0, 2.0]
