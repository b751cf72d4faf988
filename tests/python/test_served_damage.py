"""Damaged snapshots of exported models: an error that names the file when they are opened."""

import pathlib
import shutil

import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from chain_writer import Change, publish
from op_helpers import ops
from served_helpers import describe, lookup, same_bits, served_table
from serving_helpers import FORMS, delta, plain, rows
from test_serving_damage import flip

import tf_dynemb as de

ERRORS = (tf.errors.DataLossError, tf.errors.InvalidArgumentError)


@pytest.fixture
def table():
    table = de.DynamicVariable(4, "uniform", "host", name="user")
    table.upsert(np.arange(40), np.random.default_rng(3).normal(size=[40, 4]))
    return table


@pytest.fixture
def chain(tmp_path, table):
    """A base and a delta."""
    path = tmp_path / "tables"
    de.dump(path, table)
    table.upsert([3, 99], np.ones([2, 4]))
    table.erase([5])
    de.incremental_dump(path, table)
    return path


def files_that_are_read(chain) -> list[pathlib.Path]:
    """The files that lookups need: not the times of rows, or the state of their optimizer."""
    names = ("MANIFEST", "keys", "vectors", "index", "deleted")
    files = [f for f in sorted(chain.rglob("*.*")) if any(name in f.name for name in names)]
    assert len(files) == 8
    return files


def opened(table, descriptor):
    handle = served_table(table)
    ops.dynemb_open_served_table(handle, descriptor)
    return handle


def test_every_flipped_byte_is_found(tmp_path, table, chain):
    descriptor = describe(tmp_path, chain)
    rng = np.random.default_rng(5)
    keys = np.arange(-3, 120)
    expected = lookup(opened(table, descriptor), keys)
    for file in files_that_are_read(chain):
        size = file.stat().st_size
        for offset in rng.choice(size, min(1000, size), replace=False).tolist():
            content = flip(file, offset)
            found, error = None, ""
            try:
                found = lookup(opened(table, descriptor), keys)
            except ERRORS as raised:
                error = raised.message
            # White space of the manifest has no meaning: there, the vectors are the same.
            if found is None:
                assert file.parent.name in error, (file, offset)
            else:
                assert file.name == "MANIFEST.json", (file, offset)
                assert same_bits(found, expected), offset
            file.write_bytes(content)
    assert same_bits(lookup(opened(table, descriptor), keys), expected)


def test_every_truncated_file_is_found(tmp_path, table, chain):
    descriptor = describe(tmp_path, chain)
    rng = np.random.default_rng(6)
    for file in files_that_are_read(chain):
        content = file.read_bytes()
        # The last byte of the manifest is the end of a line.
        lengths = rng.choice(len(content.rstrip()), min(100, len(content) - 1), replace=False)
        for length in lengths.tolist():
            file.write_bytes(content[:length])
            with pytest.raises(ERRORS, match=file.name):
                opened(table, descriptor)
        file.unlink()
        with pytest.raises(tf.errors.DataLossError, match=f"{file} is missing"):
            opened(table, descriptor)
        file.write_bytes(content)
    opened(table, descriptor)


def test_descriptor_without_its_tables(tmp_path, table, chain):
    descriptor = describe(tmp_path, chain)
    shutil.rmtree(chain)
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
    with pytest.raises(ERRORS, match=f"d.json.*{message}"):
        opened(table, str(tmp_path / "d.json"))


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, '"\\ud800', '{"a": 1, "a": 2}', "01", "1.", "nul"]
)
def test_text_that_is_not_json(tmp_path, table, text):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(tf.errors.DataLossError, match=r"d\.json"):
        opened(table, str(tmp_path / "d.json"))


def test_manifest_of_a_later_version(tmp_path, table, chain):
    manifest = next(chain.glob("*base*/MANIFEST.json"))
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 9'))
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{manifest} is of version 9"):
        opened(table, describe(tmp_path, chain))


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


def test_large_models_are_verified_before_each_use(tmp_path, table):
    """Their vectors are right, or the lookup fails."""
    chain = tmp_path / "tables"
    de.dump(chain, table)
    descriptor = describe(tmp_path, chain, verify_bytes=0)
    keys = np.arange(-3, 120)
    expected = lookup(opened(table, descriptor), keys)
    assert same_bits(expected, table.lookup(keys, insert=False))
    base = next(chain.glob("*base*"))
    rng = np.random.default_rng(8)
    for column in ("keys", "vectors", "index"):
        file = base / f"000.r0.{column}.npy"
        for offset in rng.choice(range(128, file.stat().st_size), 100, replace=False).tolist():
            content = flip(file, offset)
            handle = opened(table, descriptor)
            with pytest.raises(tf.errors.DataLossError, match=f"{file} is damaged.*offset 0"):
                lookup(handle, keys)
            pooled = [keys], [np.int64(1)], [len(keys)], [4]
            with pytest.raises(tf.errors.DataLossError, match=f"{file} is damaged"):
                h.lookup_sparse([handle], *pooled, insert=False)
            del handle  # otherwise the next one would be of the same model
            file.write_bytes(content)


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

    @pytest.mark.parametrize("column", ["keys", "vectors", "deleted", "MANIFEST"])
    @pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
    def test_a_damaged_delta_changes_nothing(self, tmp_path, base, handle, column, damage):
        path = tmp_path / "deltas"
        broken = delta(path, plain([1], 20, deleted=[2]), base, 10, 20)
        delta(path, plain([3], 30), broken, 20, 30)
        name = "MANIFEST.json" if column == "MANIFEST" else f"000.r0.{column}.npy"
        file = broken.directory / name
        content = file.read_bytes()
        if damage == "truncated":
            file.write_bytes(content[:-3])
        elif damage == "removed":
            file.unlink()
        else:
            flip(file, len(content) - 3)
        for _ in range(2):
            with pytest.raises(tf.errors.DataLossError, match=broken.directory.name):
                ops.dynemb_apply_snapshots(handle, str(path))
            assert self.first(handle) == [0, 1, 2]
            assert int(ops.dynemb_served_state(handle).watermark) == 10
        file.write_bytes(content)
        assert int(ops.dynemb_apply_snapshots(handle, str(path))) == 2
        assert self.first(handle) == [20, -1, 30]
        assert int(ops.dynemb_apply_snapshots(handle, str(path))) == 0

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
