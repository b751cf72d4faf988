"""Wrote golden/v3: a base, and deltas whose steps change rows that they do not have.

`expected.npy` [12, 3] has the rows of a dense variable with the same training. The script was run
once, with tests/python in PYTHONPATH, and is never run again.
"""

import pathlib

import numpy as np
from catch_up_helpers import NUM_IDS, Pair

import tf_dynemb as de

path = pathlib.Path(__file__).parent / "v3"
pair = Pair("adamw")
pair.step(range(NUM_IDS))
pair.train(200, ids=[0])
de.dump(path / "chain", [pair.table], pair.optimizer, quiet=True)
pair.train(180, ids=[1, 2], first=200)
de.incremental_dump(path / "chain", [pair.table], optimizer=pair.optimizer, quiet=True)
pair.train(20, ids=[3], first=400)
de.incremental_dump(path / "chain", [pair.table], optimizer=pair.optimizer, quiet=True)
np.save(path / "expected.npy", pair.dense.numpy())
