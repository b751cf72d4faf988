"""The computations in benchmarks/: phases of a step, ratios, merging."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from benchmarks import input as of_input
from benchmarks import online, serving
from benchmarks.harness import DENSE, OURS, STATIC, TFRA, Result, interleave, merge, table_lines
from benchmarks.phases import BETWEEN, OTHERS, PYTHON, Event, attribute
from tf_dynemb import cli

LOOKUP = "model/embed:DynembLookupSparse"


def test_every_instant_belongs_to_the_innermost_phase() -> None:
    events = [
        Event("FunctionRun", 1, 10, 90),
        Event(LOOKUP, 2, 20, 60),
        Event("dynemb: insert", 2, 30, 50),
        Event("dynemb: grow the index", 2, 35, 40),
        Event("loss/Sum:Sum", 3, 55, 70),  # at first during the lookup
        Event("EagerLocalExecute: __inference_step_12", 1, 5, 95),  # not an operator of the step
    ]
    assert attribute(events, 0, 100) == {
        PYTHON: 10 + 10,
        BETWEEN: 10 + 20,
        "LookupSparse: the rest": 10 + 5,
        "LookupSparse: insert": 5 + 10,
        "LookupSparse: grow the index": 5,
        OTHERS: 15,  # it began later than the lookup
    }


def test_phases_are_cut_at_the_edges_of_the_window() -> None:
    events = [
        Event(LOOKUP, 1, -50, 30),
        Event("loss/Sum:Sum", 1, 80, 200),
        Event(LOOKUP, 1, 200, 300),
    ]
    assert attribute(events, 0, 100) == {"LookupSparse: the rest": 30, PYTHON: 50, OTHERS: 20}


def test_phases_of_different_operators_are_apart() -> None:
    events = [
        Event(LOOKUP, 1, 0, 10),
        Event("dynemb: wait for locks", 1, 2, 4),
        Event("opt/apply:DynembApplyGradients", 2, 10, 20),
        Event("dynemb: wait for locks", 2, 10, 11),
    ]
    totals = attribute(events, 0, 20)
    assert totals["LookupSparse: wait for locks"] == 2
    assert totals["ApplyGradients: wait for locks"] == 1
    assert sum(totals.values()) == 20


def test_all_forms_of_input_have_the_same_batches(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("pyarrow")
    found = {}
    for name, begin in of_input.Files(tmp_path, 96, 32, 50).forms().items():
        batches = list(begin())
        assert len(batches) == 3
        ids, numbers, labels = (np.concatenate(each) for each in zip(*batches, strict=True))
        if ids.dtype == object:
            ids = tf.strings.to_hash_bucket_fast(ids, of_input.MOST_KEY)
        found[name] = np.asarray(ids), np.asarray(numbers), np.asarray(labels)
    ids, numbers, labels = found.pop("npy, keys")
    for name, (others, given, marks) in found.items():
        np.testing.assert_array_equal(ids, others, err_msg=name)
        np.testing.assert_allclose(numbers, given, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(labels, marks, err_msg=name)


def test_a_ratio_above_one_means_that_we_are_ahead() -> None:
    values = {OURS: [4.0, 2.0, 3.0], DENSE: [6.0]}
    assert Result("speed", "keys/s", values).ratio(DENSE) == 0.5
    assert Result("time", "s", values, less_is_better=True).ratio(DENSE) == 2.0
    assert Result("time", "s", values).ratio(STATIC) is None
    assert Result("time", "s", values).spread(OURS) == pytest.approx(2 / 3)


def test_merge_puts_runs_side_by_side_and_keeps_the_first_figures() -> None:
    first = Result("case", "s", {OURS: [1.0], STATIC: [2.0]})
    second = Result("case", "s", {TFRA: [3.0], STATIC: [9.0]})
    (merged,) = merge([first, second])
    assert merged.values == {OURS: [1.0], STATIC: [2.0], TFRA: [3.0]}
    head, _, line = table_lines([merged])
    assert TFRA in head
    assert line.split()[:2] == ["case", "s"]


def test_contenders_take_turns() -> None:
    order = []

    def action(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = interleave({n: (lambda n=n: action(n)) for n in "ab"}, repeats=2, warm_up=1)
    assert order[2:] == ["a", "b", "b", "a"]
    assert values == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_copies_of_a_table_are_served_as_tables(tmp_path: pathlib.Path) -> None:
    table = serving.empty_table(0)
    serving.fill(table, 100)
    de.dump(tmp_path / "dump", table)
    (base,) = (tmp_path / "dump").glob("*-base-*")
    size = serving.multiply(base)
    assert size > serving.TABLES * 100 * serving.DIM * 4
    assert cli.main(["verify", str(tmp_path / "dump")]) == 0
    tables = [table, *(serving.empty_table(n) for n in range(1, serving.TABLES))]
    model = serving.Model(tables)
    de.export_saved_model(model, tmp_path / "model", "external", tmp_path / "dump")
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    keys = np.arange(100)
    expected = tf.add_n([table.lookup(keys)] * serving.TABLES)
    np.testing.assert_array_equal(loaded.serve(keys), expected)
    assert (loaded.serve([100]).numpy() == 0).all()


def test_a_follower_of_everything_predicts_as_the_trainer(tmp_path) -> None:
    rng = np.random.default_rng(0)
    seconds = 3600 * np.sort(rng.integers(0, 12, 300))
    ratings = np.stack([*rng.integers(0, 30, (2, 300)), rng.integers(0, 11, 300), seconds], axis=1)
    outcome = online.run(ratings, share=0.5, most=16, dim=4, path=tmp_path / "chain")
    errors = outcome.errors
    assert 5 <= outcome.publications <= 7
    assert len(errors["whole"]) == 150
    assert np.array_equal(errors["whole"], errors["trainer"])
    first = int((seconds[150:] == seconds[150]).sum())
    for name in ("frozen", "rows"):
        assert np.array_equal(errors[name][:first], errors["trainer"][:first])
        assert not np.array_equal(errors[name], errors["trainer"])
    online.draw(outcome, 24 * seconds[150:], tmp_path / "online.svg")
    assert (tmp_path / "online.svg").read_text().startswith("<?xml")
