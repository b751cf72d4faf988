"""What notebooks show of tables, readers, chains, snapshots and watermarks."""

from __future__ import annotations

import html
import re

import keras
import pytest

import tf_dynemb as de
from tf_dynemb.tables import summary
from tf_dynemb.tables.options import TableOptions


def lines_of(text):
    found = re.findall(r"<th [^>]*>([^<]*)</th><td [^>]*>([^<]*)</td>", text)
    return {html.unescape(name): html.unescape(value) for name, value in found}


def test_a_table():
    table = de.DynamicVariable(4, name="users <1>", max_capacity=100, var_type="host")
    assert lines_of(table._repr_html_())["rows"] == "0 of at most 100"
    de.OptimizerWrapper(keras.optimizers.Adagrad()).build([table])
    table.lookup([1, 2, 3])
    table.lookup([1, 2, 3])
    text = table._repr_html_()
    assert "<caption>users &lt;1&gt;: int64 to 4 x float32</caption>" in text
    lines = lines_of(text)
    stats = table.stats()
    assert lines == {
        "rows": "3 of at most 100",
        "bytes of rows": f"{stats['row_bytes']} bytes",
        "bytes of the index": f"{stats['index_bytes'] / 1024:.1f} KiB",
        "load of the index": f"{3 / stats['slots']:.1%}",
        "ids that had a row": "50.0%",
        "a full table evicts by": "lru",
        "optimizer state": "adagrad",
    }


def test_tiers_and_losses():
    stats = dict.fromkeys(de.DynamicVariable(1).stats(), 0)
    stats |= {"size": 10_000, "device_rows": 1000, "file_rows": 7000, "file_bytes": 5 * 2**30}
    stats |= {"evictions": 3, "expired": 2000, "row_bytes": 1024, "index_bytes": 3 * 2**41}
    lines = lines_of(summary.of_table("t", TableOptions(), "", stats))
    assert lines == {
        "rows": "10,000",
        "rows in GPU memory": "1,000",
        "rows in files": "7,000",
        "bytes of rows": "1.0 KiB",
        "bytes of the index": "6.0 TiB",
        "bytes of files": "5.0 GiB",
        "rows evicted": "3",
        "rows expired": "2,000",
    }


@pytest.fixture
def chain(tmp_path):
    """A base and two deltas of two tables; the path, the tables and the last watermark."""
    path = tmp_path / "<chain>"
    tables = [de.DynamicVariable(4, name=name, var_type="host") for name in ("a <b>", "c")]
    for table in tables:
        table.lookup(range(1200))
    de.dump(path, tables)
    tables[0].upsert([1], [[0.0] * 4])
    de.incremental_dump(path, tables)
    tables[0].upsert([1, 7000], [[1.0] * 4] * 2)
    tables[1].erase([3])
    mark = de.incremental_dump(path, tables, extra={"day": "<1>"})
    return path, tables, mark


def expected(mark, **lines):
    return {
        "snapshot": mark.id[:8],
        "watermark": str(mark.tick),
        "time": f"{mark.utc:%Y-%m-%d %H:%M:%S} UTC",
        **lines,
        "extra": "{'day': '<1>'}",
    }


def test_a_reader(chain):
    path, _, mark = chain
    text = de.serving.Reader(path)._repr_html_()
    assert f"<caption>Reader of {html.escape(str(path))}</caption>" in text
    assert "<1>" not in text
    assert "<b>" not in text
    tables = {
        "table a <b>": "1,201 rows: int64 to 4 x float32",
        "table c": "1,199 rows: int64 to 4 x float32",
    }
    assert lines_of(text) == expected(mark, **tables)


def test_a_reader_of_a_model(tmp_path):
    model = keras.Sequential([keras.Input([1], dtype="int64"), de.layers.Embedding(2, name="ids")])
    model.add(keras.layers.Dense(1))
    model(keras.ops.array([[5]]))
    de.dump(tmp_path, model)
    lines = lines_of(de.serving.Reader(tmp_path)._repr_html_())
    assert lines["table ids/embeddings"] == "0 rows: int64 to 2 x float32"
    assert lines["dense weights"] == "2"
    assert "extra" not in lines


def test_a_chain(chain):
    path, _, mark = chain
    found = de.storage.Chain.open(path)
    text = found._repr_html_()
    assert f"<caption>Chain at {html.escape(str(path))}</caption>" in text
    assert "<1>" not in text
    assert "<b>" not in text
    sizes = [
        sum(file.stat().st_size for file in each.directory.glob("*.npy"))
        for each in found.snapshots
    ]
    tables = {
        "base": f"2,400 rows, {sizes[0] / 1024:.1f} KiB",
        "deltas": f"2: 3 rows, 1 deleted, {sum(sizes[1:]) / 1024:.1f} KiB",
        "table a <b>": "int64 to 4 x float32",
        "table c": "int64 to 4 x float32",
    }
    assert lines_of(text) == expected(mark, **tables)
    lines = lines_of(de.storage.Chain.open(found.base.directory)._repr_html_())
    assert lines["base"] == tables["base"]
    assert "deltas" not in lines


def test_a_snapshot(chain):
    path, _, mark = chain
    found = de.storage.Chain.open(path)
    text = found.last._repr_html_()
    assert f"<caption>Snapshot {html.escape(str(found.last.directory))}</caption>" in text
    assert "<1>" not in text
    assert "<b>" not in text
    size = sum(file.stat().st_size for file in found.last.directory.glob("*.npy"))
    tables = {"table a <b>": "int64 to 4 x float32", "table c": "int64 to 4 x float32"}
    assert lines_of(text) == expected(
        mark,
        continues=found.deltas[0].manifest.id[:8],
        delta=f"2 rows, 1 deleted, {size / 1024:.1f} KiB",
        **tables,
    )
    lines = lines_of(found.base._repr_html_())
    assert lines["base"] == lines_of(found._repr_html_())["base"]
    assert "continues" not in lines


def test_a_chain_of_small_rows(chain, tmp_path):
    path, _, _ = chain
    de.publish(tmp_path / "served", from_=path, rows="int8")
    lines = lines_of(de.storage.Chain.open(tmp_path / "served")._repr_html_())
    assert lines["table c"] == "int64 to 4 x int8"
    lines = lines_of(de.serving.Reader(tmp_path / "served")._repr_html_())
    assert lines["table c"] == "1,199 rows: int64 to 4 x float32"


def test_a_watermark(chain):
    text = chain[2]._repr_html_()
    assert "<1>" not in text
    assert lines_of(text) == expected(chain[2])
