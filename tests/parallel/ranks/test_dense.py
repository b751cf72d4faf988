"""Dense weights of several ranks in dumps, and Publish in their `fit`."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from publish_process import Interrupt, bits, build, fit

import tf_dynemb as de
from tf_dynemb import storage

pytestmark = pytest.mark.ranks(2, 4)


def train(comm, seed, path, *callbacks):
    """Trains; what each rank draws at random is different."""
    model = build(seed=seed + comm.rank)
    fit(model, path, de.callbacks.SynchronizeRanks(), *callbacks, every=4)
    return bits(model)


def test_a_resumed_training_ends_as_an_uninterrupted_one(comm, shared_path):
    expected = train(comm, 10, shared_path / "whole")
    for batches in (5, 17):  # in the first epoch, and after one whose end averaged statistics
        path = shared_path / str(batches)
        with pytest.raises(KeyboardInterrupt):
            train(comm, 10, path, Interrupt(batches))
        assert train(comm, 20, path) == expected


def test_each_rank_gets_the_values_that_it_had(comm, shared_path):
    def make():
        return {
            "table": de.DynamicVariable(2),
            "same": tf_variable(1.0, trainable=True),
            "own": tf_variable(float(comm.rank), trainable=False),
        }

    def tf_variable(value, trainable):
        return keras.Variable([value], trainable=trainable, dtype="float32")

    variables = make()
    de.dump(shared_path, variables)
    (directory,) = shared_path.glob("0*")
    manifest = storage.Snapshot(directory).manifest
    ranks = {file.rank: file.bytes for file in manifest.dense if file.part == "weights"}
    assert ranks.keys() == set(range(comm.size))
    assert all(ranks[rank] < ranks[0] for rank in range(1, comm.size))
    variables["own"].assign([9.0])
    de.load(shared_path, variables)
    assert np.array_equal(variables["own"], [comm.rank])
    # All that one process reads are the values of rank 0.
    assert de.serving.Reader(shared_path).dense()["own"] == [0.0]


def test_trainable_weights_must_be_equal(comm, shared_path):
    variables = {"table": de.DynamicVariable(2), "w": keras.Variable([float(comm.rank)])}
    with pytest.raises(ValueError, match="the weight 'w' is not the same on rank 1 as on rank 0"):
        de.dump(shared_path, variables)
    assert not list(shared_path.glob("0*"))
    de.broadcast_variables([variables["w"]])
    de.dump(shared_path, variables)


def test_ranks_with_other_models(comm, shared_path):
    variables = {"table": de.DynamicVariable(2), f"w{comm.rank}": keras.Variable([1.0])}
    with pytest.raises(ValueError, match="the variables must be the same on all ranks"):
        de.dump(shared_path, variables)


def test_another_number_of_ranks(comm, shared_path):
    own = keras.Variable([float(comm.rank)], trainable=False)
    de.dump(shared_path, {"table": de.DynamicVariable(2), "own": own})
    (directory,) = shared_path.glob("0*")
    chain = storage.Chain.open(directory)
    assert chain.last.dense("weights", 1)["own"].values == [1.0]
    assert chain.last.dense("weights", comm.size)["own"].values == [0.0]
