"""Chains at URLs of stores behave as those at paths: `fsspec`'s memory, and an S3 server."""

from __future__ import annotations

import os
import re

import keras
import numpy as np
import table_reader
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_dynemb as de
from tf_dynemb import cli, storage
from tf_dynemb.chains import merge
from tf_dynemb.serving import Reader
from tf_dynemb.storage import publication


def memory_url() -> str:
    return f"memory://{os.urandom(6).hex()}/chain"


class Trained:
    """Two tables and their optimizer; `step` trains some rows, and erases some."""

    def __init__(self, ranks=1) -> None:
        self.tables = {
            "a": de.DynamicVariable(4, name="a", initializer="ones"),
            "b": de.DynamicVariable(
                3, name="b", key_type="int32", dtype="float16", initializer="ones"
            ),
        }
        self.optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.1))

    def step(self, ids, erased=()):
        for table in self.tables.values():
            keys = tf.constant(ids, table.key_type)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cast(table.sparse_read(keys), tf.float32) ** 2)
            self.optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            if erased:
                table.erase(tf.constant(erased, table.key_type))

    def rows(self):
        """Returns all rows with their optimizer state."""
        return {name: table_reader.rows_of(table) for name, table in self.tables.items()}


def read(reader) -> dict:
    """Returns all that a reader has, in an order that does not depend on how it is stored."""
    found = {"id": reader.id, "watermark": reader.watermark}
    ids = np.arange(-2, 30)
    for name in reader.tables:
        items = {
            int(k): v.tobytes()
            for keys, rows in reader.items(name)
            for k, v in zip(keys, rows, strict=True)
        }
        found[name] = (
            reader.size(name),
            reader.contains(ids, name).tolist(),
            reader.lookup(ids, name).tolist(),
            sorted(items.items()),
        )
    return found


ACTIONS = st.sampled_from(
    ["dump", "delta", "delta", "delta", "follow", "merge", "rollback", "prune", "load"]
)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(ACTIONS, st.sets(st.integers(0, 20), min_size=1, max_size=6)), max_size=10)
)
def test_a_url_is_as_good_as_a_path(tmp_path_factory, actions):
    """The same calls have the same effects at both, or raise the same."""
    places = [str(tmp_path_factory.mktemp("chain") / "chain"), memory_url()]
    trained = [Trained(), Trained()]
    readers = [None, None]
    for number, (action, ids) in enumerate([("dump", {1, 2, 3}), *actions]):
        found = []
        for i, place in enumerate(places):
            try:
                if action in ("dump", "delta"):
                    trained[i].step(sorted(ids), [max(ids)] if number % 3 == 0 else ())
                if action == "dump":
                    de.dump(place, trained[i].tables, trained[i].optimizer, keep=number % 2)
                elif action == "delta":
                    compact = 3 if number % 4 == 0 else None
                    de.incremental_dump(
                        place,
                        trained[i].tables,
                        optimizer=trained[i].optimizer,
                        compact_every=compact,
                        keep=1,
                    )
                elif action == "follow":
                    readers[i] = readers[i] or Reader(place)
                    found.append(readers[i].follow())
                elif action == "merge":
                    found.append(merge.merge(place, keep=1) is None)
                elif action == "rollback":
                    names = storage.places.place_of(place).names()
                    merge.rollback(place, names[min(ids) % len(names)].id)
                elif action == "prune":
                    found.append(len(publication.prune(place, min(ids) % 2)))
                elif action == "load":
                    de.load(place, trained[i].tables, trained[i].optimizer)
            except Exception as error:
                found.append((type(error), re.sub(r"\S*chain\S*|[0-9a-f]{8,}", "", str(error))))
        assert found[: len(found) // 2] == found[len(found) // 2 :], action
        chains = [storage.Chain.open(place) for place in places]
        kinds = [[each.manifest.kind for each in chain.snapshots] for chain in chains]
        assert kinds[0] == kinds[1]
        states = [read(Reader(place, verify=True)) for place in places]
        for state in states:
            del state["id"], state["watermark"]
        assert states[0] == states[1]
    assert cli.main(["verify", places[1]]) == 0
    into = [Trained(), Trained()]
    for each, place in zip(into, places, strict=True):
        de.load(place, each.tables, each.optimizer)
    assert table_reader.same(into[0].rows(), into[1].rows())
