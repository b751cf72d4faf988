"""Tables with automatic names: on disk, and by their place in a model."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from dump_helpers import make, vectors_of

import tf_dynemb as de


def filled(layer: de.layers.Embedding, value: float) -> de.layers.Embedding:
    layer.table.upsert([1], tf.fill([1, layer.dim], value))
    return layer


def two(first: float, second: float, **options):
    layers = [filled(de.layers.Embedding(2, **options), value) for value in (first, second)]
    return [layer.table for layer in layers]


@pytest.fixture
def quiet():
    """Fails at a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize("kind", ["layers", "variables", "static"])
def test_tables_that_could_be_swapped_are_named_in_a_warning(tmp_path, kind):
    if kind == "layers":
        tables = two(1.0, 2.0)
    elif kind == "variables":
        tables = [de.DynamicVariable(2) for _ in range(2)]
    else:
        tables = [de.Variable(tf.zeros([3, 2])) for _ in range(2)]
    names = [table.name.removesuffix(":0") for table in tables]
    with pytest.warns(UserWarning, match="dump: the names of .* are automatic") as said:
        de.dump(tmp_path, tables)
    assert all(repr(name) in str(said[0].message) for name in names)
    assert said[0].filename == __file__
    with pytest.warns(UserWarning, match="load: the names of .* are automatic"):
        de.load(tmp_path, tables)


def test_one_of_two_on_disk(tmp_path):
    tables = two(1.0, 2.0)
    de.dump(tmp_path, dict(zip("ab", tables, strict=True)))
    other = filled(de.layers.Embedding(2), 3.0).table
    de.dump(tmp_path / "two", {other.name.removesuffix(":0"): other, "a": tables[0]})
    with pytest.warns(UserWarning, match="load: the names of .* are automatic"):
        de.load(tmp_path / "two", other)


def test_tables_that_cannot_be_swapped(tmp_path, quiet):
    # Tables of different forms, one table alone, tables with names, or with names for this call.
    de.dump(tmp_path / "forms", [de.DynamicVariable(2), de.DynamicVariable(3)])
    de.dump(tmp_path / "one", de.DynamicVariable(2))
    de.dump(tmp_path / "named", [make("a"), make("b"), de.DynamicVariable(2)])
    tables = dict(zip("ab", two(1.0, 2.0), strict=True))
    de.dump(tmp_path / "dict", tables)
    de.load(tmp_path / "dict", tables)
    layers = [de.layers.Embedding(2, name=name) for name in ("x", "y")]
    de.dump(tmp_path / "layers", layers)
    de.load(tmp_path / "layers", layers)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"initializer": "zeros"}, "initializer"),
        ({"padding_id": 0}, "padding_id"),
        ({"hash_strings": True}, "string_hash"),
    ],
)
def test_another_table_of_that_name(tmp_path, options, says):
    one = de.layers.Embedding(2)
    name = one.table.name.removesuffix(":0")
    de.dump(tmp_path, one)
    keras.utils.clear_session()
    while (other := de.layers.Embedding(2, **options)).table.name.removesuffix(":0") != name:
        pass
    with pytest.raises(ValueError, match=f"has {says} .* on disk.*The name is automatic"):
        de.load(tmp_path, other)
    de.load(tmp_path, {name: other.table})


# named_tables


class Tower(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.user = de.layers.Embedding(2)
        self.more = [de.layers.Embedding(2), de.layers.MultiTableEmbedding(2, 2)]
        self.by_name = {"x": de.layers.Embedding(2), "y": de.layers.Embedding(2, name="why")}

    def call(self, ids):
        return self.user(ids) + self.more[0](ids)


class Model(keras.Model):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        parts = {"tower": Tower, "table": lambda: de.DynamicVariable(2)}
        # In another order each time: the automatic names differ.
        for name in np.random.default_rng(seed).permutation(sorted(parts)):
            setattr(self, name, parts[name]())
        self.shared = self.tower.user

    def call(self, ids):
        return self.tower(ids)


PLACES = {
    "tower/user": lambda model: model.tower.user.table,
    "tower/more/0": lambda model: model.tower.more[0].table,
    "tower/more/1/table_0": lambda model: model.tower.more[1].tables[0],
    "tower/more/1/table_1": lambda model: model.tower.more[1].tables[1],
    "tower/by_name/x": lambda model: model.tower.by_name["x"].table,
    "why/embeddings": lambda model: model.tower.by_name["y"].table,
    "table": lambda model: model.table,
}


def test_places_of_a_subclassed_model():
    model = Model()
    found = de.named_tables(model)
    assert set(found) == set(PLACES)
    assert all(found[name] is place(model) for name, place in PLACES.items())


def test_models_that_create_their_layers_in_another_order(tmp_path, quiet):
    first, second = Model(0), Model(1)
    for number, place in enumerate(PLACES.values()):
        place(first).upsert([1], tf.fill([1, 2], float(number)))
    de.dump(tmp_path, de.named_tables(first))
    de.load(tmp_path, de.named_tables(second))
    for place in PLACES.values():
        assert vectors_of(place(second)) == vectors_of(place(first))


def test_functional_and_sequential_models():
    ids = keras.Input((1,), dtype="int64")
    layers = [de.layers.Embedding(2), de.layers.Embedding(2), de.layers.Embedding(2, name="c")]
    model = keras.Model(ids, keras.layers.Add()([layer(ids) for layer in layers]))
    found = de.named_tables(model)
    assert list(found) == ["layers/1", "layers/2", "c/embeddings"]
    assert found["layers/2"] is model.layers[2].table
    sequential = keras.Sequential([de.layers.Embedding(2), keras.layers.Flatten()])
    assert list(de.named_tables(sequential)) == ["layers/0"]
    outer = keras.Sequential([sequential, keras.layers.Dense(1)])
    assert list(de.named_tables(outer)) == ["layers/0/layers/0"]


def test_modules_and_lone_tables():
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.tables = {"a": de.DynamicVariable(2), "b": make("named")}

    module = Module()
    assert de.named_tables(module) == {
        "tables/a": module.tables["a"],
        "named": module.tables["b"],
    }


def test_what_cannot_be_named():
    class Hidden(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self._table = de.layers.Embedding(2)

    with pytest.raises(ValueError, match="not among the public attributes of Hidden"):
        de.named_tables(Hidden())
    with pytest.raises(ValueError, match="no tables"):
        de.named_tables(keras.layers.Dense(1))
    twins = keras.Sequential(
        [
            de.layers.Embedding(2, name="same"),
            keras.Sequential([de.layers.Embedding(2, name="same")]),
        ]
    )
    with pytest.raises(ValueError, match="Two tables are named 'same/embeddings'"):
        de.named_tables(twins)
