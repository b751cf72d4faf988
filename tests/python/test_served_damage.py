"""Served tables of damaged descriptors and blocks, and of snapshots that are applied.

`test_damage.py` damages files.
"""

import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from chain_writer import Change, publish
from op_helpers import ops
from served_helpers import describe, lookup, opened, served_table
from serving_helpers import FORMS, delta, plain, rows
from storage_helpers import flip

import tf_dynemb as de


@pytest.fixture
def table():
    table = de.DynamicVariable(4, "uniform", "host", name="user")
    table.upsert(np.arange(40), np.random.default_rng(3).normal(size=[40, 4]))
    return table


def test_descriptor_without_its_tables(tmp_path, table):
    chain = tmp_path / "tables"
    chain.mkdir()
    descriptor = describe(tmp_path, chain)
    with pytest.raises(tf.errors.DataLossError, match=f"{chain} holds no snapshot.*{descriptor}"):
        opened(table, descriptor)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged: it is not JSON"),
        ("[]", "is not the description"),
        ('{"format": "tf_dynemb.served_tables"}', "has no version"),
        ('{"format": "tf_dynemb.served_tables", "version": 1}', "names no tables"),
        (
            '{"format": "tf_dynemb.served_tables", "version": 9, "tables": "x"}',
            "version 9; this tf_dynemb reads version 1",
        ),
        (
            '{"format": "tf_dynemb.served_tables", "version": 1, "tables": "x", '
            '"follow_seconds": 0}',
            "follow_seconds is wrong",
        ),
    ],
)
def test_damaged_descriptor(tmp_path, table, text, message):
    (tmp_path / "d.json").write_text(text)
    errors = (tf.errors.DataLossError, tf.errors.InvalidArgumentError)
    with pytest.raises(errors, match=f"d.json.*{message}"):
        opened(table, str(tmp_path / "d.json"))


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, '"\\ud800', '{"a": 1, "a": 2}', "01", "1.", "nul"]
)
def test_text_that_is_not_json(tmp_path, table, text):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(tf.errors.DataLossError, match=r"d\.json"):
        opened(table, str(tmp_path / "d.json"))


def test_a_checksum_that_is_not_utf8(tmp_path, table):
    """The error quotes it: TensorFlow would raise UnicodeDecodeError for its bytes."""
    de.dump(tmp_path / "t", table)
    (manifest,) = tmp_path.glob("t/*/MANIFEST.json")
    content = manifest.read_bytes()
    flip(manifest, content.rindex(b'"') - 1, bit=7)
    with pytest.raises(
        tf.errors.DataLossError, match=rf"{manifest} is damaged: .*\\x[0-9a-f]{{2}}"
    ):
        opened(table, describe(tmp_path, tmp_path / "t"))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"\xff", r"\\xff"),
        (b"\xc3\xa9\xf0\x9f\x98\x80\x7f", "\u00e9\U0001f600\x7f"),
        (b"\xc0\x80 \xed\xa0\x80 \xf4\x90\x80\x80 \xe2\x82", None),  # none of them permitted
    ],
)
def test_errors_can_be_decoded(table, raw, shown):
    """Whatever bytes an error quotes, such as those of a name."""
    escaped = "".join(chr(b) if b == 32 else rf"\\x{b:02x}" for b in raw)
    with pytest.raises(tf.errors.OpError, match=rf"no{shown or escaped}/such"):
        opened(table, b"/no" + raw + b"/such")


@pytest.mark.parametrize("form", FORMS)
def test_dumps_of_the_python_writer_open(tmp_path, form):
    """With optimizer state, floats of any length, and names that JSON escapes."""
    path = tmp_path / "chain"
    shape = FORMS[form]
    held = rows(range(9), 5, shape)
    publish(path, "base", {form: Change(held)}, watermark=1, forms=FORMS)
    table = de.DynamicVariable(
        shape.dimension, "zeros", "host", key_type=shape.key_type, dtype=shape.dtype, name=form
    )
    handle = opened(table, describe(tmp_path, path))
    found = lookup(handle, np.arange(9, dtype=shape.key_type), table.dtype)
    expected = np.array([row.vector for row in held.values()])
    assert found.numpy().view(expected.dtype).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ['é"\\/\n', "名前", "\U0001f600", "a b\x7f", "\ud800x"])
def test_names_that_json_escapes(tmp_path, name):
    table = de.DynamicVariable(2, "ones", "host", name="user")
    de.dump(tmp_path / "t", {name: table})
    handle = served_table(table, name.encode("utf-8", "surrogatepass"))
    ops.dynemb_open_served_table(handle, describe(tmp_path, tmp_path / "t"))
    assert lookup(handle, [1]).numpy().tolist() == [[1, 1]]


@pytest.mark.parametrize("verify_bytes", [0, 1 << 30])
def test_only_damaged_blocks_fail(tmp_path, verify_bytes):
    """A block is 4 KiB here; with lookups of other blocks, damage is not found."""
    path = tmp_path / "chain"
    snapshot = publish(path, "base", plain(range(5000)), watermark=1)
    table = de.DynamicVariable(3, -1.0, "host", name="plain")
    descriptor = describe(tmp_path, path, verify_bytes=verify_bytes)
    file = snapshot.directory / "000.r0.vectors.npy"
    content = flip(file, 128 + 12 * 4000)
    if verify_bytes:
        with pytest.raises(tf.errors.DataLossError, match=f"{file} is damaged.*offset 45056"):
            opened(table, descriptor)
    else:
        handle = opened(table, descriptor)
        assert lookup(handle, [0, 3600, 4999]).numpy()[:, 0].tolist() == [0, 3600, 4999]
        with pytest.raises(tf.errors.DataLossError, match=f"{file} is damaged.*offset 45056"):
            lookup(handle, [4000])
    file.write_bytes(content)
    assert lookup(opened(table, descriptor), [4000]).numpy()[:, 0].tolist() == [4000]


@pytest.mark.parametrize("verify_bytes", [0, 1 << 30])
@pytest.mark.parametrize("ranks", [2, 5])
def test_several_shards(tmp_path, ranks, verify_bytes):
    """A table that several ranks have written, in a base and in deltas."""
    path = tmp_path / "chain"
    base = publish(path, "base", plain(range(300)), watermark=10, ranks=ranks)
    changes = plain([*range(7), *range(400, 410)], 900, deleted=range(10, 40))
    delta(path, changes, base, 10, 20, ranks=ranks)
    table = de.DynamicVariable(3, -1.0, "host", name="plain")
    handle = opened(table, describe(tmp_path, path, verify_bytes=verify_bytes))
    expected = np.full(450, -1.0)
    expected[:300] = range(300)
    expected[[*range(7), *range(400, 410)]] = range(900, 917)
    expected[10:40] = -1
    assert lookup(handle, np.arange(450)).numpy()[:, 0].tolist() == expected.tolist()
    assert h.size(handle) == 300 - 30 + 10


class TestApply:
    """Snapshots that are applied to an open model."""

    @pytest.fixture
    def base(self, tmp_path):
        return publish(tmp_path / "chain", "base", plain([1, 2, 3]), watermark=10)

    @pytest.fixture
    def handle(self, tmp_path, base):
        table = de.DynamicVariable(3, -1.0, "host", name="plain")
        return opened(table, describe(tmp_path, base.directory.parent))

    def first(self, handle):
        return lookup(handle, [1, 2, 3]).numpy()[:, 0].tolist()

    def test_a_gap(self, tmp_path, base, handle):
        path = tmp_path / "deltas"
        missing = delta(tmp_path / "lost", plain([1], 20), base, 10, 20)
        delta(path, plain([3], 30), missing, 20, 30)
        with pytest.raises(tf.errors.DataLossError, match="a gap before"):
            ops.dynemb_apply_snapshots(handle, str(path))
        late = delta(tmp_path / "late", plain([3], 30), None, 20, 30)
        with pytest.raises(tf.errors.DataLossError, match=r"changes since 20, but only .* 10"):
            ops.dynemb_apply_snapshots(handle, str(late.directory))
        assert self.first(handle) == [0, 1, 2]

    def test_a_new_base_replaces_the_state(self, tmp_path, handle):
        path = tmp_path / "chain"
        publish(path, "base", plain([2, 3], 50), watermark=5, watermark_utc_ns=2 * 10**18)
        assert int(ops.dynemb_apply_snapshots(handle, str(path))) == 1
        assert self.first(handle) == [-1, 50, 51]

    def test_deltas_that_insert_and_erase_again_and_again(self, tmp_path, base, handle):
        """Deleted keys that the base does not have are not kept."""
        parent, path, number = base, tmp_path / "deltas", 0
        for step in range(20):
            changes = plain([1000 + step], step, deleted=[999 + step] if step else [])
            parent = delta(path, changes, parent, 10 + step, 11 + step)
            number += int(ops.dynemb_apply_snapshots(handle, str(path)))
        assert number == 20
        assert lookup(handle, np.arange(999, 1020)).numpy()[:, 0].tolist() == [-1] * 20 + [19]
        names, values = ops.dynemb_stats(handle)
        stats = dict(zip(names.numpy().tolist(), values.numpy().tolist(), strict=True))
        assert stats[b"size"] == 4
        assert stats[b"slots"] <= 8 + 64
