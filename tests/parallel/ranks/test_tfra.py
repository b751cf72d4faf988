"""tf_dynemb.tfra with several ranks: one table over all of them, with TFRA's methods."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from parallel.ranks.gathered import whole_table
from tf_dynemb import tfra

pytestmark = pytest.mark.ranks(2, 4)


def train(comm, variable, steps):
    """Steps with ids of each rank; returns the ids of all ranks."""
    optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.5))
    everyone = []
    for step in range(steps):
        rank_ids = [np.arange(20) + 7 * rank + 10 * step for rank in range(comm.size)]
        with tf.GradientTape() as tape:
            vectors = tfra.embedding_lookup(variable, tf.constant(rank_ids[comm.rank]), name="x")
            loss = tf.reduce_sum(vectors)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        everyone.append(np.concatenate(rank_ids))
    return everyone


def test_steps_create_rows_on_their_owners(comm):
    variable = tfra.Variable(dim=2, name="steps", initializer=1.0)
    everyone = train(comm, variable, 3)
    rows = whole_table(comm, variable)
    keys, counts = np.unique(np.concatenate(everyone), return_counts=True)
    np.testing.assert_array_equal(rows.keys, keys)
    expected = np.repeat(1.0 - 0.5 * counts[:, np.newaxis], 2, axis=1)
    np.testing.assert_allclose(rows.vectors, expected)
    assert 0 < int(variable.size()) < len(keys)


def test_methods_take_any_keys(comm):
    variable = tfra.Variable(dim=2, name="methods")
    rank_keys = np.arange(10) + 100 * comm.rank
    variable.upsert(rank_keys, tf.fill([10, 2], float(comm.rank)))
    every = np.concatenate([np.arange(10) + 100 * rank for rank in range(comm.size)])
    values, exists = variable.lookup(np.append(every, 7777), return_exists=True)
    np.testing.assert_array_equal(values[:-1, 0], np.repeat(np.arange(comm.size), 10))
    assert exists.numpy().tolist() == [True] * len(every) + [False]
    old, exists = variable.lookup(rank_keys, return_exists=True)
    variable.accum(rank_keys, old, old + 1.0, exists)
    variable.remove(rank_keys[:5])
    rows = whole_table(comm, variable)
    kept = np.concatenate([np.arange(5, 10) + 100 * rank for rank in range(comm.size)])
    np.testing.assert_array_equal(rows.keys, kept)
    np.testing.assert_array_equal(rows.vectors[:, 0], np.repeat(np.arange(comm.size), 5) + 1)


@pytest.mark.parametrize("policy", ["TimestampRestrictPolicy", "FrequencyRestrictPolicy"])
def test_each_rank_restricts_its_rows(comm, policy):
    variable = tfra.Variable(
        dim=2, name=f"restricted_{policy}", restrict_policy=getattr(tfra, policy)
    )
    everyone = train(comm, variable, 3)
    before = variable.export()[0].numpy()
    assert variable.restrict(5) == len(before) - 5
    after = variable.export()[0].numpy()
    assert len(after) == 5
    last = np.isin(before, everyone[-1])
    if policy == "TimestampRestrictPolicy" and last.sum() >= 5:
        assert np.isin(after, everyone[-1]).all()
    if policy == "FrequencyRestrictPolicy":
        # Each rank's step counts the rows that it holds, once.
        steps = sum(np.isin(before, ids).astype(int) for ids in everyone)
        left = steps[np.isin(before, after)]
        assert left.min() >= np.sort(steps)[-5]


def test_files_load_on_any_number_of_ranks(comm, shared_path):
    variable = tfra.Variable(dim=2, name="files", initializer=1.0)
    train(comm, variable, 2)
    variable.save_to_file_system(str(shared_path))
    comm.barrier()
    assert len(list(shared_path.glob("files_mht_1of1_rank*-keys"))) == comm.size
    other = tfra.Variable(dim=2, name="files", initializer=1.0)
    other.load_from_file_system(str(shared_path))
    checked = tfra.Variable(dim=2, name="files")
    tfra.load_checkpoint(shared_path, checked)
    expected = whole_table(comm, variable)
    for loaded in (other, checked):
        rows = whole_table(comm, loaded)
        np.testing.assert_array_equal(rows.keys, expected.keys)
        np.testing.assert_array_equal(rows.vectors, expected.vectors)
        assert int(loaded.size()) == int(variable.size())


def test_there_is_no_second_derivative_with_respect_to_a_table(comm):
    variable = tfra.Variable(dim=2, name="second", initializer=1.0)

    def penalty(target):
        with tf.GradientTape() as inner:
            vectors = tfra.embedding_lookup(variable, tf.constant([comm.rank]))
            loss = tf.reduce_sum(vectors**3)
        gradient = inner.gradient(loss, variable if target is None else vectors)
        return tf.reduce_sum((gradient.values if target is None else gradient) ** 2)

    with tf.GradientTape() as outer:
        value = penalty(None)
    with pytest.raises(NotImplementedError, match="there is no second derivative"):
        outer.gradient(value, variable)
    with tf.GradientTape() as outer:
        value = penalty("vectors")
    values = outer.gradient(value, variable).values
    np.testing.assert_allclose(values, np.full(values.shape, 36.0))
