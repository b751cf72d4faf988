"""What a notebook shows of a table."""

from __future__ import annotations

import re

import keras

import tf_dynemb as de
from tf_dynemb.tables import summary
from tf_dynemb.tables.options import TableOptions


def lines_of(text):
    return dict(re.findall(r"<th [^>]*>([^<]*)</th><td [^>]*>([^<]*)</td>", text))


def test_a_table():
    table = de.DynamicVariable(4, name="users <1>", max_capacity=100, var_type="host")
    assert lines_of(table._repr_html_())["rows"] == "0 of at most 100"
    de.OptimizerWrapper(keras.optimizers.Adagrad()).build([table])
    table.lookup([1, 2, 3])
    table.lookup([1, 2, 3])
    text = table._repr_html_()
    assert "<caption>users &lt;1&gt;:0: int64 to 4 x float32</caption>" in text
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
