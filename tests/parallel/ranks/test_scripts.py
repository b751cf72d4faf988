"""The examples that run on several ranks train as they do on one."""

from __future__ import annotations

import contextlib
import importlib
import io
import pathlib
import re

import pytest

import tf_dynemb as de
from parallel.ranks.gathered import one_rank

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def run(module, *arguments):
    """Returns the measurements of a script, and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        measured = module.run(module.parse_options([*map(str, arguments)]))
    return measured, out.getvalue()


@pytest.mark.ranks(2, 4)
def test_dlrm(comm, example, shared_path):
    dlrm = example("dlrm")
    few = ["--samples", 1024, "--test-samples", 333, "--batch-size", 64, "--test-batch-size", 150]
    sizes = ["--rows-at-most", 300, "--dim", 4, "--bottom", 8, "--top", 16]
    sizes += ["--hotness", *"32121111111111111111111111", "--dims", *"44444444444444444444444446"]
    more = ["--phases", "--dump", shared_path / "tables", "--learning-rate", 0.05, "--epochs", 2]
    measured, printed = run(dlrm, *few, *sizes, *more)
    with one_rank():
        alone, _ = run(dlrm, *few, *sizes, *more[3:])
    if comm.rank:
        assert (measured, printed) == (None, "")
        return
    for name in ("loss", "auc", "logloss"):
        assert measured[name] == pytest.approx(alone[name], rel=2e-3), name
    assert "333 test samples" in printed
    table = printed.partition("phase of a step")[2]
    found = dict(re.findall(r"^(\S.{33}) *([0-9.]+) ", table, re.MULTILINE))
    phases = {name.strip(): float(ms) for name, ms in found.items()}
    total = phases.pop("the step, traced")
    assert sum(phases.values()) == pytest.approx(total, rel=0.02)
    exchanges = {"exchange keys", "exchange vectors", "exchange gradients"}
    assert exchanges | {"route keys", "pool vectors", "sum gradients"} < phases.keys()
    assert all(phases[name] > 0 for name in exchanges)

    rows = re.search(r"rows in the tables of each rank: (.*)", printed)[1].split(", ")
    assert len(rows) == comm.size
    reader = de.serving.Reader(shared_path / "tables")
    held = sum(reader.size(table) for table in reader.tables)
    assert held == sum(int(n.replace(",", "")) for n in rows)


@pytest.mark.ranks(2)
def test_dlrm_with_a_narrow_wire_type_and_with_look_ahead(comm, example):
    options = ["--samples", 512, "--test-samples", 256, "--batch-size", 64, "--bottom", 8]
    options += ["--rows-at-most", 300, "--dim", 4, "--top", 16]
    (plain, _), (narrow, _), (ahead, printed) = [
        run(example("dlrm"), *options, *more)
        for more in ([], ["--exchange-dtype", "int8"], ["--look-ahead", "--phases"])
    ]
    if comm.rank == 0:
        assert narrow["loss"] == pytest.approx(plain["loss"], rel=0.02)
        assert narrow["loss"] != plain["loss"]
        assert ahead["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert "exchange what changed since" in printed


@pytest.mark.ranks(2)
def test_dlrm_refuses_batches_that_it_cannot_divide(comm, example):
    with pytest.raises(ValueError, match="--batch-size 63 is no multiple of 2 ranks"):
        run(example("dlrm"), "--batch-size", 63)


@pytest.mark.ranks(2)
def test_model_parallel(comm, example, shared_path):
    pytest.importorskip("pyarrow")
    script = example("model_parallel")
    measured, printed = run(script, "--epochs", 1, "--output-dir", shared_path)
    if comm.rank == 0:
        assert 0.90 < measured["auc"] < 0.93
        assert re.search(r"^this run \(2 ranks\)", printed, re.MULTILINE)
        adult = example("adult")
        data = adult.load()
        reader = de.serving.Reader(shared_path / "tables")
        assert reader.contains(data.train.ids).all()
        rows = re.search(r"rows of the table on each rank: (\d+), (\d+)", printed)
        assert int(rows[1]) + int(rows[2]) == reader.size()
        assert min(int(rows[1]), int(rows[2])) > 50
    else:
        assert (measured, printed) == (None, "")
