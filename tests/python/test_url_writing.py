"""Writing of chains to stores: what is sent, when it fails, by several writers and ranks."""

from __future__ import annotations

import contextlib
import glob
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

import boto3
import fsspec
import numpy as np
import pytest
import table_reader
import tensorflow as tf
from cli_helpers import fails
from rank_model import Rank, contents, run_on
from rank_threads import outcomes, ranks_are_threads, run
from store_helpers import BUCKET, objects
from test_served_copy import Trainer, answers
from test_store_failures import Cutting, Failing
from test_url_chains import Trained, memory_url, read

import tf_dynemb as de
from tf_dynemb import cli
from tf_dynemb.chains.publish import publish
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Part, files, stored_part
from tf_dynemb.storage.places import place_of


def uploads():
    """Returns the uploads of the server that were begun and not completed."""
    found = boto3.client("s3").list_multipart_uploads(Bucket=BUCKET)
    return found.get("Uploads", [])


def threads():
    return {each.name for each in threading.enumerate() if not each.daemon}


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The folder of temporary files; each test ends without any."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


# The vectors of 65535 rows have 4 MiB with their header, which is the unit of writing.
@pytest.mark.parametrize("rows", [0, 1, 65_534, 300_000])
def test_columns_of_several_parts(s3, scratch, rows):
    """A base has its columns sent in parts; the keys and their index are on the disk meanwhile."""
    table = de.DynamicVariable(16, name="t")
    ids = np.arange(rows) * 3
    if rows:
        table.upsert(ids, np.random.default_rng(1).normal(size=(rows, 16)))
    on_disk, parts = [], []
    real = stored_part._StoreOutput._send

    def send(output, data):
        parts.append(len(data))
        found = glob.glob(f"{scratch}/*/*")
        on_disk.append(sorted({os.path.basename(each).split(".")[2] for each in found}))
        real(output, data)

    with mock.patch.object(stored_part._StoreOutput, "_send", send):
        de.dump(s3, [table])
    # A small column is sent when it is closed, and the index may be there then.
    assert all(set(found) <= {"keys", "index"} for found in on_disk)
    assert rows < 100_000 or on_disk[0] == ["keys"]
    assert len(parts) >= (7 if rows > 100_000 else 0)
    assert uploads() == []
    loaded = de.DynamicVariable(16, name="t")
    de.load(s3, [loaded])
    assert table_reader.same(table_reader.contents([loaded]), table_reader.contents([table]))
    assert cli.main(["verify", s3]) == 0


def test_memory_does_not_depend_on_the_size_of_a_table(s3, scratch):
    """Columns that have been sent need none."""
    tables = [de.DynamicVariable(64, name=f"t{i}") for i in range(6)]
    for table in tables:
        table.upsert(np.arange(40_000), np.ones((40_000, 64)))
    outputs, most = [], [0]
    real = stored_part._StoreOutput._send

    def send(output, data):
        real(output, data)
        outputs.append(output)
        held = {id(each): each._file.buffer.getbuffer().nbytes for each in outputs if each._file}
        most[0] = max(most[0], sum(held.values()))

    with mock.patch.object(stored_part._StoreOutput, "_send", send):
        de.dump(s3, tables)
    assert len(outputs) > 6 * 3
    assert 0 < most[0] < 3 * 20 << 20


CALLS = ("put_file", "pipe_file", "cat_file", "cat_ranges", "ls", "find", "rm_file", "open")


@pytest.mark.filterwarnings("ignore:superseded snapshots cannot be removed")
@pytest.mark.parametrize("kind", ["base", "delta"])
@pytest.mark.parametrize("once", [False, True])
def test_requests_that_fail(scratch, kind, once):
    """Wherever it fails, there are whole snapshots, nothing is left here, and the next goes on."""
    trained = Trained()
    here = threads()
    fs = fsspec.filesystem("memory")
    outcomes = []
    while outcomes[-1:] != ["done"]:
        url = memory_url()
        trained.step([1, 2, 3])
        de.dump(url, trained.tables, trained.optimizer)
        before = read(Reader(url))
        trained.step([len(outcomes) % 9, 5], [2])
        fail, message = Failing(len(outcomes), once), ""
        with contextlib.ExitStack() as stack, mock.patch.object(files, "_AT_A_TIME", 1):
            for name in CALLS:
                stack.enter_context(mock.patch.object(fs, name, fail(getattr(fs, name))))
            try:
                if kind == "base":
                    de.dump(url, trained.tables, trained.optimizer)
                else:
                    de.incremental_dump(url, trained.tables, optimizer=trained.optimizer)
            except OSError as error:
                message = str(error)
        outcomes.append("failed" if message else "done" if fail.left >= 0 else "published")
        assert not message or ("planted" in message and url in message)
        assert list(scratch.iterdir()) == []
        assert threads() <= here
        now = read(Reader(url, verify=True))
        assert now == before if message else now == live(trained, now)
        trained.step([7])
        if kind == "base":
            for _ in range(2):  # the second one removes what failed with the number of the first
                de.dump(url, trained.tables, trained.optimizer)
            assert len({each.partition("/")[0] for each in objects(url)}) == 2
        else:
            de.incremental_dump(url, trained.tables, optimizer=trained.optimizer)
        now = read(Reader(url))
        assert now == live(trained, now)
    assert outcomes.count("failed") > 8
    assert "published" in outcomes


def live(trained, like):
    """Returns what a reader of the tables as they are now would have, except its id."""
    found = dict(like)
    for name, table in trained.tables.items():
        rows = table_reader.rows_of(table)
        vectors = like[name][2]
        expected = dict(zip(rows.keys.tolist(), rows.vectors.astype(np.float32), strict=True))
        present = [key in expected for key in range(-2, 30)]
        known = [
            expected[key].tolist() if key in expected else vectors[key + 2] for key in range(-2, 30)
        ]
        found[name] = (
            len(expected),
            present,
            known,
            sorted((key, value.tobytes()) for key, value in expected.items()),
        )
    return found


@pytest.mark.parametrize("at", range(1, 8))
def test_an_upload_that_is_cut(s3, scratch, at):
    """A dump that fails in the middle leaves no uploads, and no threads."""
    table = de.DynamicVariable(16, name="t")
    table.upsert(np.arange(300_000), np.ones((300_000, 16)))
    here, calls = threads(), []
    real = stored_part._StoreOutput._send

    def send(output, data):
        calls.append(output)
        if len(calls) == at:
            raise ConnectionError("planted")
        real(output, data)

    with (
        mock.patch.object(stored_part._StoreOutput, "_send", send),
        pytest.raises(ConnectionError, match="planted"),
    ):
        de.dump(s3, [table])
    assert uploads() == []
    assert threads() <= here
    assert objects(s3) == []
    de.dump(s3, [table])
    assert Reader(s3).size() == 300_000


def test_another_number_of_rows():
    """The header of a file that is sent has its number of rows."""
    url = memory_url()
    for counts in ((2,), (4,), (3, 1)):
        with de.storage.Publication(url, "base") as publication:
            writer = publication.part.column(0, "vectors", np.float32, (2,), rows=3)
            for count in counts:
                writer.append(np.ones((count, 2), np.float32))
                with contextlib.suppress(OSError):
                    writer.flush()
            with pytest.raises((OSError, ValueError), match=r"expected rows|writing it failed"):
                writer.close()
    assert objects(url) == []


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_two_dumps_at_once(kind):
    """One is published, and the other one is told."""
    one, other = Trained(), Trained()
    one.step([1, 2])
    url = memory_url()
    de.dump(url, one.tables, one.optimizer)
    de.load(url, other.tables, other.optimizer)
    one.step([3])
    other.step([4])
    real = Part.with_files

    def write(of):
        if kind == "base":
            de.dump(url, of.tables, of.optimizer, keep=1)
        else:
            de.incremental_dump(url, of.tables, optimizer=of.optimizer)

    def late(part, tables):
        with mock.patch.object(Part, "with_files", real):
            write(one)
        return real(part, tables)

    with (
        mock.patch.object(Part, "with_files", late),
        pytest.raises((RuntimeError, ValueError), match=r"another process has published|a gap"),
    ):
        write(other)
    assert [name.kind for name in place_of(url).names()] == ["base", kind]
    assert Reader(url).contains(np.array([3, 4]), "a").tolist() == [True, False]


def test_a_store_that_is_emptied():
    """A snapshot gets no number but the one that its folder has."""
    trained = Trained()
    trained.step([1])
    url = memory_url()
    de.dump(url, trained.tables)
    fs, root = fsspec.core.url_to_fs(url)
    real = Part.with_files

    def late(part, tables):
        for each in objects(url):
            if each.startswith("00000001"):
                fs.rm_file(f"{root}/{each}")
        return real(part, tables)

    with (
        mock.patch.object(Part, "with_files", late),
        pytest.raises(RuntimeError, match="another process has published"),
    ):
        de.dump(url, trained.tables)
    assert place_of(url).names() == []
    de.dump(url, trained.tables)
    assert [name.number for name in place_of(url).names()] == [1]


@pytest.mark.parametrize("is_there", [False, True])
def test_an_answer_that_is_lost(is_there):
    """Of the creation of the object that publishes the snapshot, which may have been created."""
    trained = Trained()
    trained.step([1])
    url = memory_url()
    fs = fsspec.filesystem("memory")
    real = fs.pipe_file

    def lost(path, value, mode="overwrite"):
        if mode == "create":
            if is_there:
                real(path, value, mode=mode)
            raise TimeoutError("planted")
        real(path, value, mode=mode)

    with mock.patch.object(fs, "pipe_file", lost), contextlib.ExitStack() as stack:
        if not is_there:
            stack.enter_context(pytest.raises(OSError, match="planted"))
        de.dump(url, trained.tables)
    assert len(place_of(url).names()) == is_there


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConnectionError])
def test_an_end_that_is_not_known(error):
    """Nothing that may have been published is removed."""
    trained = Trained()
    trained.step([1])
    url = memory_url()
    de.dump(url, trained.tables)
    trained.step([2])
    fs = fsspec.filesystem("memory")
    real, read_file = fs.pipe_file, fs.cat_file
    fails = []

    def ends(path, value, mode="overwrite"):
        real(path, value, mode=mode)
        if mode == "create":
            fails.append(path)
            raise error("planted")

    def reads(*args, **options):
        if len(fails) == 1:
            fails.append("read")
            raise ConnectionError("planted")
        return read_file(*args, **options)

    with (
        mock.patch.object(fs, "pipe_file", ends),
        mock.patch.object(fs, "cat_file", reads),
        pytest.raises((KeyboardInterrupt, OSError), match="planted"),
    ):
        de.incremental_dump(url, trained.tables)
    assert cli.main(["verify", url]) == 0
    assert Reader(url).contains(np.array([1, 2]), "a").all()
    de.load(url, trained.tables)
    trained.step([3])
    de.incremental_dump(url, trained.tables)
    assert Reader(url).contains(np.array([1, 2, 3]), "a").all()


def test_files_of_others_that_cannot_be_removed():
    """They are no reason to fail."""
    trained = Trained()
    trained.step([1])
    url = memory_url()
    de.dump(url, trained.tables)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/00000001-base-{'ab' * 16}.{'cd' * 8}/MANIFEST.json", b"half")
    trained.step([2])
    with (
        mock.patch.object(fs, "rm_file", side_effect=PermissionError("denied")),
        pytest.warns(UserWarning, match=f"files of other writers cannot be removed: {url}.*denied"),
    ):
        de.incremental_dump(url, trained.tables)
    assert Reader(url).contains(np.array([1, 2]), "a").all()


KILLED = """
import sys, numpy as np, tf_dynemb as de
url = sys.argv[1]
table = de.DynamicVariable(16, name="t")
watermark = de.load(url, [table])
sys.stdout.write("loaded\\n"); sys.stdout.flush()
for number in range(1, 1000):
    ids = np.arange(50_000 if number % 3 else 9)
    table.upsert(ids, np.full((len(ids), 16), float(number)))
    if number % 3:
        de.dump(url, [table], quiet=True)
    else:
        de.incremental_dump(url, [table], quiet=True)
"""


@pytest.mark.slow
def test_writers_that_are_killed(s3):
    """Whenever it is, readers find a whole chain, and the next writer goes on."""
    table = de.DynamicVariable(16, name="t")
    table.upsert(np.arange(50_000), np.zeros((50_000, 16)))
    de.dump(s3, [table])
    rng = random.Random(3)
    kills = int(os.environ.get("STORE_KILLS", "4"))
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", KILLED, s3], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"loaded\n"
        time.sleep(rng.uniform(0, 1.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        reader = Reader(s3, verify=True)
        vectors = reader.lookup(np.arange(50_000))
        assert len(np.unique(vectors[9:])) == len(np.unique(vectors[:9])) == 1
        assert reader.size() == 50_000
    de.load(s3, [table])
    for _ in range(2):  # the second one removes what was killed with the number of the first
        de.dump(s3, [table])
    assert len({each.partition("/")[0] for each in objects(s3)}) == 2


@pytest.mark.parametrize("size", [2, 3])
def test_ranks(monkeypatch, size):
    """Each sends its rows, on any number of ranks; they share no file system."""
    url = memory_url()
    with ranks_are_threads(monkeypatch):
        ranks = [None] * size

        def train(comm):
            rank = ranks[comm.rank] = Rank(comm, url)
            rank.write(range(-20, 60), 1)
            rank.dump()
            rank.write(range(30), 2)
            rank.erase([3, 40])
            rank.dump_delta()

        run(size, train)
        expected = contents(ranks)
        for other in (1, 2, 4):
            loaded = [None] * other

            def load(comm, loaded=loaded):
                loaded[comm.rank] = Rank(comm, url)
                loaded[comm.rank].load()

            run(other, load)
            assert table_reader.same(contents(loaded), expected)
    names = {each.partition("/")[2].split(".")[1] for each in objects(url) if ".npy" in each}
    assert names == {f"r{rank}" for rank in range(size)}
    assert cli.main(["verify", url]) == 0


def test_a_rank_that_fails(monkeypatch, scratch):
    """Nothing is published, and nothing is left."""
    url = memory_url()
    with ranks_are_threads(monkeypatch):
        ranks = run(2, lambda comm: Rank(comm, url))
        run_on(ranks, lambda rank: (rank.write(range(9), 1), rank.dump()))
        before = objects(url)
        real = Part.with_files

        def fails(part, tables):
            if part.rank == 1:
                raise OSError("planted")
            return real(part, tables)

        with mock.patch.object(Part, "with_files", fails):
            found = outcomes(2, lambda comm: ranks[comm.rank].dump())
        assert all(each.error is not None for each in found)
        assert "planted" in str(found[1].error)
    assert objects(url) == before


def test_a_copy_that_goes_on_until_it_is_ended(tmp_path, s3, s3_server):
    """`publish --every`: through failures of the store, until SIGTERM."""
    trainer = Trainer(tmp_path / "chain")
    proxy = Cutting(s3_server, every=11)
    environment = {**os.environ, "AWS_ENDPOINT_URL": proxy.url, "AWS_MAX_ATTEMPTS": "1"}
    copy = tmp_path / "copy"
    command = [sys.executable, "-m", "tf_dynemb", "publish", s3, copy, "--every", "0.05"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert "holds no snapshot, or does not exist" in process.stderr.readline()
        for number in range(4):
            trainer.do("base" if number % 2 == 0 else "delta", {number, 7})
            publish(s3, from_=trainer.path)
            end = time.monotonic() + 30
            place = place_of(copy)
            while [name.id for name in place.names()][-1:] != [trainer.last.id]:
                assert time.monotonic() < end
                time.sleep(0.05)
            assert answers(Reader(copy)) == answers(Reader(trainer.path))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert len(out.splitlines()) == 4


def test_wrong_arguments_end_it(capsys, tmp_path):
    message = fails(capsys, 2, "publish", "memory://x/y", tmp_path / "copy", "--every", "-1")
    assert "--every must be a number of seconds above 0, got -1.0" in message
    # A chain that is not there can come; an argument does not become right.
    message = fails(capsys, 2, "publish", "s3:/x", tmp_path / "copy", "--every", "0.1")
    assert "must be a URL with a path" in message


def test_a_model_with_the_rows_of_a_store(tmp_path):
    trained = Trained()
    trained.step([1, 2, 3])
    url = memory_url()
    de.dump(url, trained.tables)
    module = tf.Module()
    module.table = trained.tables["a"]
    module.__call__ = tf.function(
        lambda ids: tf.nn.embedding_lookup(module.table, ids),
        input_signature=[tf.TensorSpec([None], tf.int64)],
    )
    expected = Reader(url).lookup([1, 2, 9], "a")
    trained.step([1, 2, 3])
    with pytest.raises(ValueError, match=r"polls a local path.*publish memory://.* PATH --every 1"):
        de.export_saved_model(module, tmp_path / "model", "copy", url, follow=url)
    with pytest.raises(ValueError, match="tables='link' needs a local dump, got 'memory://"):
        de.export_saved_model(module, tmp_path / "model", "link", url)
    assert not (tmp_path / "model").exists()
    de.export_saved_model(module, tmp_path / "model", "copy", url)
    loaded = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded(tf.constant([1, 2, 9], tf.int64)), expected)
