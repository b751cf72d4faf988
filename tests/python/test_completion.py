"""The views of editors, notebooks and mypy: signatures, completed names, representations."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import textwrap

import keras
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb.serving import Reader
from tf_dynemb.tables.options import LayerArguments, TableArguments, TableOptions
from tf_dynemb.variables.dynamic import _ONLY_RAISE

CLASSES = [
    de.DynamicVariable,
    de.layers.Embedding,
    de.layers.EmbeddingBag,
    de.layers.MultiTableEmbedding,
]


def test_the_typed_options_are_the_options_of_the_table():
    fields = {field.name for field in dataclasses.fields(TableOptions)}
    assert set(TableArguments.__annotations__) == fields - {"var_type"}
    assert set(LayerArguments.__annotations__) >= fields


@pytest.mark.parametrize("made", CLASSES)
def test_signatures_have_each_option_with_its_default(made):
    parameters = inspect.signature(made).parameters
    for field in dataclasses.fields(TableOptions):
        assert parameters[field.name].default == field.default
    assert "self" not in parameters
    assert "table_options" not in parameters
    assert next(iter(parameters)) in ("dimension", "dim")


def test_the_signature_of_a_class_of_the_user():
    class Mine(de.layers.Embedding):
        def __init__(self, vocabulary, **kwargs):
            super().__init__(4, **kwargs)

    class Plain(de.layers.Embedding):
        pass

    assert list(inspect.signature(Mine).parameters) == ["vocabulary", "kwargs"]
    assert inspect.signature(Plain) == inspect.signature(de.layers.Embedding)


def test_names_that_only_raise_are_not_completed():
    table = de.DynamicVariable(2, name="t")
    names = set(dir(table))
    assert not names & _ONLY_RAISE
    assert {"lookup", "peek", "upsert", "erase", "stats", "options", "name", "shape"} <= names
    for name in _ONLY_RAISE:
        with pytest.raises((NotImplementedError, RuntimeError, ValueError, AttributeError)):
            _try(table, name)


def _try(table, name):
    """Calls a method with the arguments that it may take."""
    value = getattr(table, name)
    for arguments in ((), (1,), ([1], [[1.0, 2.0]])):
        try:
            value(*arguments)
        except TypeError:
            continue
        except tf.errors.OpError as error:
            raise RuntimeError from error
        raise AssertionError(f"{name}{arguments} did not raise")


def test_peek():
    table = de.DynamicVariable(2, name="t", initializer="ones")
    assert table.peek([1, 2]).numpy().tolist() == [[1.0, 1.0]] * 2
    assert table.peek([1], default_value=[5.0, 6.0]).numpy().tolist() == [[5.0, 6.0]]
    assert len(table) == 0
    table.upsert([1], [[2.0, 3.0]])

    @tf.function
    def peek(ids):
        return table.peek(ids)

    assert peek(tf.constant([[1, 9]], tf.int64)).numpy().tolist() == [[[2.0, 3.0], [1.0, 1.0]]]
    assert len(table) == 1
    assert table.stats()["hits"] == 1
    assert "creates a row" in inspect.getdoc(de.DynamicVariable.lookup).splitlines()[0]


def test_representations(tmp_path):
    table = de.DynamicVariable(2, name="users")
    table.upsert([1], [[1.0, 2.0]])
    mark = de.dump(tmp_path, table)
    assert repr(table) == (
        "<DynamicVariable 'users:0' dimension=2 key_type=int64 dtype=float32, rows=1>"
    )
    assert mark.id in repr(mark)
    shown = repr(Reader(tmp_path))
    assert shown.startswith(f"Reader({str(tmp_path)!r}, id={mark.id[:8]}, utc={mark.utc}")
    assert shown.endswith("users=1)")
    wrapper = de.OptimizerWrapper(keras.optimizers.Adam(0.25), catch_up=True)
    assert repr(wrapper) == "<OptimizerWrapper of Adam learning_rate=0.25 iterations=0 catch_up>"
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    wrapper = de.OptimizerWrapper(keras.optimizers.SGD(schedule))
    assert repr(wrapper) == "<OptimizerWrapper of SGD learning_rate=0.5 iterations=0>"
    assert "max_capacity=None" in repr(table.options)


WRONG = """
import tf_dynemb as de

de.DynamicVariable(8, max_capacity=100, ttl=5, file_path="x")
de.layers.Embedding(8, name="x", evict_strategy="lfu")
de.DynamicVariable(8, max_capactiy=100)
de.layers.EmbeddingBag(8, max_capacity="many")
"""


@pytest.mark.slow
def test_mypy_finds_misspelled_options(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "wrong.py"
    file.write_text(textwrap.dedent(WRONG))
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [int(line.split(":")[1]) for line in found] == [6, 7], done.stdout + done.stderr
    assert "max_capactiy" in found[0]
    assert "max_capacity" in found[1]
