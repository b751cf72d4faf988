"""Seeds of tables on ranks whose scripts give each rank another global seed."""

from __future__ import annotations

import keras

import tf_dynemb as de


def test_all_ranks_have_the_seeds_of_rank_0(comm):
    keras.utils.set_random_seed(1 + comm.rank)
    made = [
        de.DynamicVariable(4),
        de.DynamicVariable(4, name="named"),
        de.layers.Embedding(4).table,
    ]
    seeds = [table.attributes["seed"] for table in made]
    assert len(set(seeds)) == 3
    everywhere = comm.gather_objects(seeds, "seeds")
    assert all(each == everywhere[0] for each in everywhere)
    given = de.DynamicVariable(4, seed=comm.rank)  # a seed that is passed is used unchanged
    assert given.attributes["seed"] == comm.rank
