"""Copies of chains in object stores: an S3 server, and `fsspec`'s memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from unittest import mock

import fsspec
import pytest
from chain_writer import Form
from cli_helpers import fails, run
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_helpers import flipped
from store_helpers import PUBLISH, objects
from test_served_copy import FORM, Trainer, answers

from tf_dynemb import cli
from tf_dynemb.chains.publish import publish
from tf_dynemb.chains.snapshot_copy import SnapshotCopy
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain, DataLossError
from tf_dynemb.storage.local_place import list_snapshots
from tf_dynemb.storage.stores import Store


def test_a_chain_there_and_back(tmp_path, s3):
    trainer = Trainer(tmp_path / "chain")
    assert Store(s3).snapshots() == []
    with pytest.raises(FileNotFoundError, match="holds no snapshot"):
        publish(tmp_path / "local", from_=s3)
    assert not (tmp_path / "local").exists()
    trainer.do("base", {1, 2, 3})
    trainer.do("delta", {2, 4})
    published = publish(s3, from_=trainer.path)
    assert [each.directory.parent for each in published] == [trainer.path] * 2
    names = [str(name) for name in list_snapshots(trainer.path)]
    assert [str(each.name) for each in Store(s3).snapshots()] == names
    assert not any("state" in each for each in objects(s3))
    assert [each for each in objects(s3) if "/" not in each] == ["00000001", "00000002"]
    assert publish(s3, from_=trainer.path) == []
    copied = publish(tmp_path / "local", from_=s3)
    assert [each.directory.name for each in copied] == names
    assert cli.main(["verify", str(tmp_path / "local")]) == 0
    reader = Reader(tmp_path / "local")
    assert answers(reader) == answers(Reader(trainer.path))
    trainer.do("delta", {5})
    publish(s3, from_=trainer.path)
    publish(tmp_path / "local", from_=s3)
    reader.follow()
    assert answers(reader) == answers(Reader(trainer.path))
    assert publish(tmp_path / "local", from_=s3) == []
    # A base takes the place of the snapshots before it.
    trainer.do("base", {6})
    publish(s3, from_=trainer.path)
    assert [each.name.kind for each in Store(s3).snapshots()] == ["base"]
    assert {each.partition("/")[0] for each in objects(s3)} == {
        "00000004",
        Store(s3).snapshots()[0].directory,
    }
    publish(tmp_path / "local", from_=s3, keep=1)
    assert len(list_snapshots(tmp_path / "local")) == 4
    reader.follow()
    assert answers(reader) == answers(Reader(trainer.path))


def test_a_thin_copy_there_and_back(capsys, tmp_path, s3):
    trainer = Trainer(tmp_path / "chain", Form(8, history="ab" * 16))
    trainer.form = FORM
    trainer.do("base", set(range(9)))
    publish(tmp_path / "thin", from_=trainer.path, rows="int8", max_rows=4)
    assert run(capsys, "publish", tmp_path / "thin", s3)[0] == 0
    code, out = run(capsys, "publish", s3, tmp_path / "local")
    assert (code, out.splitlines()[-1]) == (0, "published: 1")
    assert answers(Reader(tmp_path / "local")) == answers(Reader(tmp_path / "thin"))
    assert Chain.open(tmp_path / "local").last.manifest.copy["max_rows"] == 4


ACTIONS = st.sampled_from(["base", "delta", "delta", "merge", "put", "put", "get"])


@settings(max_examples=30)
@given(st.lists(st.tuples(ACTIONS, st.sets(st.integers(0, 19), max_size=5)), max_size=14))
def test_copies_follow(tmp_path_factory, steps):
    """Whatever happens to the chain between two calls."""
    folder = tmp_path_factory.mktemp("store")
    url = f"memory://{folder.name}{os.urandom(4).hex()}"
    trainer = Trainer(folder / "chain")
    trainer.do("base", {1, 2, 3})
    publish(url, from_=trainer.path)
    last = answers(Reader(trainer.path))
    for action, keys in [*steps, ("put", ()), ("get", ())]:
        if action == "put":
            publish(url, from_=trainer.path)
            last = answers(Reader(trainer.path))
        elif action == "get":
            publish(folder / "local", from_=url)
            assert answers(Reader(folder / "local")) == last
        else:
            trainer.do(action, keys)
    assert cli.main(["verify", str(folder / "local")]) == 0
    shutil.rmtree(folder)


def test_two_writers(tmp_path, s3):
    """One publishes a number, and the other is told; what it has left is removed later."""
    trainers = [Trainer(tmp_path / name) for name in ("a", "b")]
    for trainer in trainers:
        trainer.do("base", {1})
    publish(s3, from_=trainers[0].path)
    shutil.rmtree(trainers[1].path)
    shutil.copytree(trainers[0].path, trainers[1].path)
    trainers[1].last, trainers[1].tick = trainers[0].last, trainers[0].tick
    for trainer in trainers:
        trainer.do("delta", {2})
    real = Store.put

    def late(*args):
        """Another process publishes while this one writes."""
        with mock.patch.object(Store, "put", real):
            publish(s3, from_=trainers[0].path)
        real(*args)

    with (
        mock.patch.object(Store, "put", late),
        pytest.raises(RuntimeError, match="another process has published snapshot 00000002 at s3:"),
    ):
        publish(s3, from_=trainers[1].path)
    ids = [trainers[0].last.id]
    assert [each.name.id for each in Store(s3).snapshots()][1:] == ids
    assert len({each.partition("/")[0] for each in objects(s3) if "/" in each}) == 2
    publish(tmp_path / "local", from_=s3)
    assert Reader(tmp_path / "local").id == ids[0]
    with pytest.raises(ValueError, match=r"is a delta that continues .* ends with"):
        publish(s3, from_=trainers[1].path)
    trainers[0].do("delta", {3})
    publish(s3, from_=trainers[0].path)
    assert len({each.partition("/")[0] for each in objects(s3) if "/" in each}) == 3


def test_a_base_that_replaces_what_is_read(tmp_path):
    """A reader that loses files begins again."""
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1})
    url = f"memory://{os.urandom(6).hex()}"
    publish(url, from_=trainer.path)
    trainer.do("base", {2})
    real = SnapshotCopy.finish

    def late(*args):
        with mock.patch.object(SnapshotCopy, "finish", real):
            publish(url, from_=trainer.path)
        real(*args)

    with mock.patch.object(SnapshotCopy, "finish", late):
        (published,) = publish(tmp_path / "local", from_=url)
    assert published.manifest.id == trainer.last.id
    assert not list((tmp_path / "local").glob(".tmp-*"))


def test_a_directory_with_another_snapshot(tmp_path):
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1})
    url = f"memory://{os.urandom(6).hex()}"
    publish(url, from_=trainer.path)
    trainer.do("delta", {2})
    publish(url, from_=trainer.path)
    fs, root = fsspec.core.url_to_fs(url)
    first, second = (f"{root}/{each.directory}/MANIFEST.json" for each in Store(url).snapshots())
    fs.pipe_file(second, fs.cat_file(first))
    with pytest.raises(DataLossError, match="is of another snapshot: base-"):
        publish(tmp_path / "local", from_=url)


def test_objects_of_others(tmp_path, s3):
    """Whatever is beside the copy, or looks like a part of it, stays as it is."""
    trainer = Trainer(tmp_path / "chain")
    for kind in ("base", "delta", "delta"):
        trainer.do(kind, {1, 2})
    fs, root = fsspec.core.url_to_fs(s3)
    fs.put(str(trainer.path), root, recursive=True)  # a backup of the chain
    others = {
        f"{root}/{name}": b"precious"
        for name in (
            *("20240101", "20240101/x", "00000001x", "00000002/x", "00000000-base/x"),
            f"00000000-base-{'0' * 32}/x",
            f"00000001-base-{'0' * 32}.old/x",
        )
    } | {place: fs.cat_file(place) for place in fs.find(root)}
    numbers = f"{root}/20240101"
    for place, content in others.items():
        fs.pipe_file(place, content)
    fs.rm_file(numbers)  # it would be the number of a snapshot, which is lost
    del others[numbers]
    near = s3.removesuffix("served") + "serve[d]"
    for url in (s3, near):
        publish(url, from_=trainer.path)
    for _ in range(2):
        trainer.do("base", {3})
        publish(near, from_=trainer.path)
    publish(s3, from_=trainer.path)
    for place, content in others.items():
        assert fs.cat_file(place) == content
    for url in (s3, near):
        publish(tmp_path / "local", from_=url)
        assert answers(Reader(tmp_path / "local")) == answers(Reader(trainer.path))
        shutil.rmtree(tmp_path / "local")
    # The number, the manifest, and the files of the last base without the state.
    assert len(objects(near)) == 2 + len(Chain.open(trainer.path).last.files) - 1


def test_what_is_missing_in_a_store(tmp_path):
    """Neither side goes on over a gap."""
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1, 2})
    url = f"memory://{os.urandom(6).hex()}"
    fs, root = fsspec.core.url_to_fs(url)
    publish(url, from_=trainer.path)
    publish(tmp_path / "local", from_=url)
    for key in (3, 4, 5):
        trainer.do("delta", {key})
    publish(url, from_=trainer.path)
    marker = fs.cat_file(f"{root}/00000003")
    fs.rm_file(f"{root}/00000003")
    trainer.do("delta", {6})
    for target, source in ((tmp_path / "local", url), (url, trainer.path)):
        with pytest.raises(DataLossError, match=rf"{url} is damaged: it lacks"):
            publish(target, from_=source)
    fs.pipe_file(f"{root}/00000003", marker)
    publish(url, from_=trainer.path)
    publish(tmp_path / "local", from_=url)
    assert answers(Reader(tmp_path / "local")) == answers(Reader(trainer.path))
    last = f"{root}/{Store(url).snapshots()[-1].directory}"
    fs.mv(last, f"{root}/away", recursive=True)
    with pytest.raises(DataLossError, match=f"{url} is damaged: it lacks its snapshot 00000005"):
        publish(url, from_=trainer.path)
    fs.mv(f"{root}/away", last, recursive=True)
    first = Store(url).snapshots()[0]
    fs.rm(f"{root}/{first.directory}", recursive=True)
    for target, source in ((tmp_path / "new", url), (url, trainer.path)):
        with pytest.raises(DataLossError, match="is damaged: it lacks"):
            publish(target, from_=source)
    # A local copy whose base is gone does not go on either.
    base = list_snapshots(tmp_path / "local")[0]
    shutil.rmtree(tmp_path / "local" / str(base))
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    with pytest.raises(DataLossError, match="local is damaged: it lacks the base"):
        publish(tmp_path / "local", from_=trainer.path)


def test_files_of_published_snapshots_stay(tmp_path):
    """Two copies of one chain have snapshots of one name; the second writer writes elsewhere."""
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", set(range(9)))
    publish(tmp_path / "thin", from_=trainer.path, where={"key_below": 5})
    url = f"memory://{os.urandom(6).hex()}"
    real = Store.put

    def late(*args):
        with mock.patch.object(Store, "put", real):
            publish(url, from_=tmp_path / "thin")
        real(*args)

    with (
        mock.patch.object(Store, "put", late),
        pytest.raises(RuntimeError, match="another process has published snapshot 00000001"),
    ):
        publish(url, from_=trainer.path)
    publish(tmp_path / "local", from_=url)
    assert answers(Reader(tmp_path / "local")) == answers(Reader(tmp_path / "thin"))
    (stored,) = Store(url).snapshots()
    Store(url)._remove([stored._replace(directory=f"{stored.name}.{'0' * 16}")])
    assert Store(url).snapshots() == [stored]


def test_a_writer_that_was_slow(tmp_path):
    """Others have published its number meanwhile, and a base, and removed the number again."""
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1})
    url = f"memory://{os.urandom(6).hex()}"
    publish(url, from_=trainer.path)
    shutil.copytree(trainer.path, tmp_path / "slow")
    slow = Trainer(tmp_path / "slow")
    slow.last, slow.tick = trainer.last, trainer.tick
    slow.do("delta", {2})
    trainer.do("delta", {3})
    real = Store.put

    def late(*args):
        with mock.patch.object(Store, "put", real):
            publish(url, from_=trainer.path)
            trainer.do("base", {4})
            publish(url, from_=trainer.path)
        real(*args)

    with (
        mock.patch.object(Store, "put", late),
        pytest.raises(RuntimeError, match="has published snapshot 00000003"),
    ):
        publish(url, from_=slow.path)
    assert [each.name.id for each in Store(url).snapshots()] == [trainer.last.id]
    assert {each.partition("/")[0] for each in objects(url)} == {
        "00000003",
        Store(url).snapshots()[0].directory,
    }


def test_whole_rows_do_not_continue_a_thin_copy(tmp_path):
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", set(range(9)))
    urls = [f"memory://{os.urandom(6).hex()}" for _ in range(2)]
    publish(tmp_path / "thin", from_=trainer.path, where={"key_below": 5})
    publish(urls[0], from_=tmp_path / "thin")
    publish(urls[1], from_=trainer.path)
    trainer.do("delta", {7, 8})
    publish(urls[1], from_=trainer.path)
    with pytest.raises(ValueError, match="has a copy with rows, where or max_rows, and"):
        publish(urls[0], from_=trainer.path)
    # A local copy goes on with the rows that it remembers.
    publish(tmp_path / "thin", from_=urls[1])
    assert publish(tmp_path / "thin", from_=trainer.path) == []
    assert Reader(tmp_path / "thin").contains(range(9)).sum() == 5
    publish(urls[0], from_=tmp_path / "thin")
    publish(tmp_path / "local", from_=urls[0])
    assert answers(Reader(tmp_path / "local")) == answers(Reader(tmp_path / "thin"))


def test_a_copy_of_a_copy_is_the_same_copy(tmp_path):
    """Without arguments; and one that has had some has them from then on."""
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", set(range(9)))
    copies = [tmp_path / "first", tmp_path / "second", tmp_path / "third"]

    def go_on():
        publish(copies[0], from_=trainer.path)
        url = f"memory://{os.urandom(6).hex()}"
        publish(url, from_=copies[0])
        for copy in copies[1:]:
            publish(copy, from_=url)
        return [Chain.open(copy).last.manifest.copy for copy in copies]

    publish(copies[0], from_=trainer.path, max_rows=6)
    publish(copies[2], from_=copies[0], rows="int8")
    first, second, third = go_on()
    assert first == second
    assert (third["rows"], "max_rows" in third) == ("int8", False)
    trainer.do("delta", {7, 8, 20})
    assert go_on()[:2] == [Chain.open(copies[0]).last.manifest.copy] * 2
    publish(copies[0], from_=trainer.path, max_rows=5)
    trainer.do("base", {7, 8, 21})
    first, second, third = go_on()
    assert [first["max_rows"], second["max_rows"]] == [5, 6]
    assert answers(Reader(copies[0])) == answers(Reader(copies[1]))
    (entry,) = Chain.open(copies[2]).last.manifest.tables
    assert entry.stored_as == "int8"


def test_fewer_rows_of_a_stored_chain(tmp_path):
    """Of a chain of training that is in a store, as of one at a path."""
    trainer = Trainer(tmp_path / "chain")
    url = f"memory://{os.urandom(6).hex()}/chain"
    stored = Trainer(url)
    for kind, keys in (("base", set(range(9))), ("delta", {2, 20, 21}), ("delta", {22})):
        for each in (trainer, stored):
            each.do(kind, keys)
        for options in ({"max_rows": 6}, {"where": {"l2_from": 0.5, "accessed_since": "1d"}}):
            name = next(iter(options))
            for target, source in (("path", trainer.path), ("url", url)):
                publish(tmp_path / f"{name}-{target}", from_=source, **options)
            readers = [Reader(tmp_path / f"{name}-{target}") for target in ("path", "url")]
            contained = [reader.contains(range(30)).tolist() for reader in readers]
            assert contained[0] == contained[1]
            assert any(contained[0])


def test_a_copy_of_a_copy_whose_arguments_change(tmp_path):
    trainer = Trainer(tmp_path / "chain")
    url = f"memory://{os.urandom(6).hex()}"
    for number, most in enumerate((6, 5, 4)):
        trainer.do("delta" if number else "base", set(range(9 + number)))
        publish(tmp_path / "thin", from_=trainer.path, max_rows=most)
        publish(url, from_=tmp_path / "thin")
        publish(tmp_path / "same", from_=url)
        first, same = (Chain.open(tmp_path / name).last.manifest for name in ("thin", "same"))
        assert first.copy == same.copy
        assert first.copy["max_rows"] == most


@pytest.mark.parametrize("options", [{"rows": "int8"}, {"max_rows": 5}, {}])
@pytest.mark.parametrize("column", ["vectors", "keys", "deleted"])
def test_damage_is_not_copied(tmp_path, options, column):
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", set(range(9)))
    publish(tmp_path / "copy", from_=trainer.path, **options)
    trainer.do("delta", {2, 7})
    file = Chain.open(trainer.path).last.directory / f"000.r0.{column}.npy"
    file.write_bytes(flipped(file.read_bytes(), 130 if column != "deleted" else 20))
    with pytest.raises(DataLossError, match=str(file)):
        publish(tmp_path / "copy", from_=trainer.path)
    assert len(list_snapshots(tmp_path / "copy")) == 1


def test_urls_of_local_files(tmp_path):
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1})
    publish(f"file://{tmp_path}/copy", from_=f"file:{trainer.path}", rows="int8")
    assert len(list_snapshots(tmp_path / "copy")) == 1
    for url in ("file://host/x", "dbfs:/x"):
        with pytest.raises(ValueError, match="is a URL, and only local files"):
            publish(url, from_=trainer.path)


def test_other_processes_are_seen(tmp_path, s3):
    """`fsspec` remembers what a folder had."""
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1})
    publish(s3, from_=trainer.path)
    for number in (2, 3):
        trainer.do("delta", {2})
        assert len(Store(s3).snapshots()) == number - 1
        subprocess.run([sys.executable, "-c", PUBLISH, s3, str(trainer.path)], check=True)
        assert len(Store(s3).snapshots()) == number


def test_what_is_refused(capsys, tmp_path, monkeypatch):
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1})
    url = f"memory://{os.urandom(6).hex()}"
    with pytest.raises(ValueError, match="is a URL, for which from_ must be local"):
        publish(url, from_=trainer.path, rows="int8")
    with pytest.raises(ValueError, match="publish a local copy, and then publish the copy"):
        publish(url, from_="s3://b/c")
    with pytest.raises(FileNotFoundError, match="holds no snapshot"):
        publish(url, from_=tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=f"{url} holds no snapshot"):
        publish(tmp_path / "local", from_=url)
    publish(url, from_=trainer.path)
    with pytest.raises(ValueError, match="has snapshots that publish did not write"):
        publish(trainer.path, from_=url)
    other = Trainer(tmp_path / "other", Form(2, state_width=2, history="cd" * 16))
    other.do("base", {1})
    with pytest.raises(ValueError, match="would replace the snapshots of other tables"):
        publish(url, from_=other.path)
    for wrong, says in (
        ("nosuch://bucket/x", "nosuch://bucket/x: Protocol not known"),
        ("simplecache::memory://x/y", "must be the URL of the store itself"),
        ("s3:/bucket/x", "must be a URL with a path, such as s3://bucket/served"),
        ("memory://", "must be a URL with a path"),
        ("simplecache::s3:/x", "must be a URL with a path"),
    ):
        assert says in fails(capsys, 2, "publish", trainer.path, wrong)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with mock.patch.dict("fsspec.registry._registry", clear=False) as registry:
        registry.pop("s3", None)
        message = fails(capsys, 2, "publish", trainer.path, "s3://bucket/x")
    assert "pip install tf_dynemb[s3]" in message
