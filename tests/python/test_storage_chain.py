"""The chain of snapshots at a path: order, gaps, and bases that supersede it while it is read."""

import shutil

import pytest
import storage_helpers as helpers

from tf_dynemb.storage import Chain, DataLossError, local_place


def test_chain(tmp_path):
    snapshots = helpers.publish_chain(tmp_path, deltas=3)
    read = Chain.open(str(tmp_path))
    assert [s.directory for s in read.snapshots] == [s.directory for s in snapshots]
    assert [s.directory.name.split("-")[:2] for s in read.snapshots] == [
        ["00000001", "base"],
        ["00000002", "delta"],
        ["00000003", "delta"],
        ["00000004", "delta"],
    ]
    assert read.base.directory == snapshots[0].directory
    assert read.last.manifest == snapshots[3].manifest
    one = Chain.open(snapshots[1].directory)
    assert (one.base, len(one.deltas), one.last.manifest) == (None, 1, snapshots[1].manifest)
    shutil.rmtree(snapshots[0].directory)
    assert Chain.open(tmp_path).base is None
    assert len(Chain.open(tmp_path).deltas) == 3


def test_numbers_with_more_digits_come_later(tmp_path):
    first, second = helpers.publish_chain(tmp_path)
    name = second.directory.name
    second.directory.rename(tmp_path / name.replace("00000002", "100000000"))
    first.directory.rename(tmp_path / first.directory.name.replace("00000001", "99999999"))
    assert Chain.open(tmp_path).last.manifest.kind == "delta"
    third = helpers.publish(tmp_path, "delta", second.manifest.id)
    assert third.directory.name.startswith("100000001-delta-")


def test_gap_is_refused(tmp_path):
    snapshots = helpers.publish_chain(tmp_path, deltas=2)
    shutil.rmtree(snapshots[1].directory)
    with pytest.raises(DataLossError, match="a gap before") as caught:
        Chain.open(tmp_path)
    for part in (
        snapshots[0].directory,
        snapshots[2].directory,
        snapshots[0].manifest.id,
        snapshots[1].manifest.id,
    ):
        assert str(part) in str(caught.value)


def test_base_that_continues_other_snapshots(tmp_path):
    """A delta of the merged snapshots may follow a merged base."""
    merged = ["1" * 32, "2" * 32]
    base = helpers.publish(tmp_path, continues=merged)
    assert base.manifest.ids == (base.manifest.id, *merged)
    with pytest.raises(ValueError, match="would have a gap"):
        helpers.publish(tmp_path, "delta", "3" * 32)
    first = helpers.publish(tmp_path, "delta", merged[1])
    with pytest.raises(ValueError, match="would have a gap"):
        helpers.publish(tmp_path, "delta", merged[1])
    second = helpers.publish(tmp_path, "delta", first.manifest.id)
    found = [snapshot.manifest.id for snapshot in Chain.open(tmp_path).snapshots]
    assert found == [base.manifest.id, first.manifest.id, second.manifest.id]


def test_manifest_of_another_snapshot_is_refused(tmp_path):
    snapshots = helpers.publish_chain(tmp_path, deltas=2)
    shutil.copy(snapshots[1].directory / "MANIFEST.json", snapshots[2].directory)
    with pytest.raises(DataLossError, match="of another snapshot"):
        Chain.open(tmp_path)


def test_path_without_snapshots(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Chain.open(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="in it: nothing"):
        Chain.open(tmp_path)
    (tmp_path / "notes").write_text("")
    (tmp_path / ".tmp-00").mkdir()
    with pytest.raises(FileNotFoundError, match=r"in it: \.tmp-00, notes"):
        Chain.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="it is a file"):
        Chain.open(tmp_path / "notes")


def test_reader_that_loses_files_to_a_base_restarts(tmp_path):
    helpers.publish_chain(tmp_path, deltas=1)
    seen = []

    def read(found):
        seen.append(found.last.manifest.id)
        if len(seen) < 3:
            helpers.publish(tmp_path, seed=len(seen))
        return [helpers.content(snapshot) for snapshot in found.snapshots]

    assert Chain.load(tmp_path, read) == helpers.chain_content(tmp_path)
    assert len(set(seen)) == 3


def test_stale_listing(tmp_path, monkeypatch):
    helpers.publish_chain(tmp_path, deltas=1)
    stale = local_place.list_snapshots(tmp_path)
    helpers.publish(tmp_path)
    listings = [stale, stale]
    fresh = local_place.list_snapshots
    monkeypatch.setattr(
        local_place, "list_snapshots", lambda path, *_: listings.pop() if listings else fresh(path)
    )
    with pytest.raises(DataLossError, match="is missing"):
        Chain.open(tmp_path)
    listings = [stale]
    assert len(Chain.open(tmp_path).snapshots) == 1
