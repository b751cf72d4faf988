"""SavedModels: the bits of the model, in other processes, after moves, and saved again."""

import contextlib
import gc
import json
import pathlib
import pickle
import resource
import shutil
import signal

import keras
import numpy as np
import pytest
import saved_model_zoo as zoo
import tensorflow as tf
import warm_python
from saved_model_client import pack

import tf_dynemb as de
from tf_dynemb import _ops
from tf_dynemb.format.manifest import checksum_of
from tf_dynemb.saved_models import checksums


def outputs(value):
    return [np.asarray(part) for part in tf.nest.flatten(pack(value), expand_composites=True)]


def assert_same_bits(found, expected):
    found, expected = outputs(found), outputs(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def in_new_process(how, jobs, tmp_path):
    """Returns the answers of saved_model_client.py."""
    file = tmp_path / f"{hash(how)}.pickle"
    file.write_bytes(pickle.dumps(jobs))
    client = pathlib.Path(__file__).parent / "saved_model_client.py"
    done = warm_python.run([str(client), how, str(file)])
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads((tmp_path / f"{file.name}.answers").read_bytes())


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Models that were exported in every way, and moved: (path, endpoint, arguments, answer)."""
    folder = tmp_path_factory.mktemp("exported")
    cases = {}
    for make in zoo.KERAS:
        model, request = make()
        zoo.fill(model)
        answer = model.predict_on_batch(request)
        name = make.__name__
        model.export(folder / f"{name}-export", verbose=False)
        cases[f"{name}-export"] = "serve", [request], answer
        if make is zoo.dense:
            tf.saved_model.save(model, folder / f"{name}-save")
            cases[f"{name}-save"] = "serving_default", [{"inputs": request}], answer
        loaded = tf.saved_model.load(folder / f"{name}-export")
        tf.saved_model.save(loaded, folder / f"{name}-again")
        cases[f"{name}-again"] = "serve", [request], answer
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("one", model.__call__, [specs(request)])
        archive.add_endpoint("two", not_training(model), [specs(request)])
        archive.write_out(folder / f"{name}-archive", verbose=False)
        cases[f"{name}-archive"] = "two", [request], answer
    for make in (zoo.sparse, zoo.ragged):
        cases.update(inputs_that_are_not_dense(folder, make))
    cases.update(tables_in_files(folder))
    made, request = zoo.module()
    answer, rows = made.serve(*request), made.rows(request[0])
    del made
    made, _ = zoo.module()  # without the rows that these lookups have inserted
    answer["size"] = made.user.size
    answer["exists"] = made.user.contains(request[0])
    answer["default"] = made.user.lookup(request[0], insert=False, default_value=tf.ones([4]))
    signatures = {"serve": made.serve, "rows": made.rows}
    tf.saved_model.save(made, folder / "module-save", signatures=signatures)
    cases["module-save"] = "serve", request, answer
    tf.saved_model.save(tf.saved_model.load(folder / "module-save"), folder / "module-again")
    cases["module-again"] = "rows", request[:1], rows
    moved = folder.with_name(folder.name + "-moved")
    folder.rename(moved)
    return [(str(moved / name), *case) for name, case in cases.items()]


def inputs_that_are_not_dense(folder, make):
    """Exports a model in every way that keeps its inputs sparse or ragged."""
    model, request = make()
    zoo.fill(model)
    answer, name = model.predict_on_batch(request), make.__name__
    spec = tf.nest.map_structure(any_size, request)
    function = tf.function(lambda inputs: model(inputs, training=False), [spec])
    de.export_saved_model(model, folder / f"{name}-export")
    de.export_saved_model(model, folder / f"{name}-spec", input_signature=[spec])
    tf.saved_model.save(tf.saved_model.load(folder / f"{name}-spec"), folder / f"{name}-again")
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", function)
    archive.write_out(folder / f"{name}-archive", verbose=False)
    for how in ("export", "again", "archive"):
        yield f"{name}-{how}", ("serve", [request], answer)
    tf.saved_model.save(model, folder / f"{name}-save", signatures=function)
    # A signature takes the parts of these tensors.
    parts = tf.nest.flatten(request, expand_composites=True)
    named = {f"inputs_{i}" if i else "inputs": part for i, part in enumerate(parts)}
    yield f"{name}-save", ("serving_default", [named], answer)


def any_size(value):
    """The type of a sparse or ragged tensor with any number of rows."""
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec([None, *value.shape[1:]], value.dtype)
    return tf.RaggedTensorSpec([None] * value.shape.rank, value.dtype, value.ragged_rank)


def tables_in_files(folder):
    """Exports tables of which most rows are in files, and removes these files."""
    model, request = zoo.in_files(folder / "rows")
    answer = model.predict_on_batch(request)
    model.export(folder / "files-keras", verbose=False)
    de.export_saved_model(model, folder / "files-export")
    shutil.rmtree(folder / "rows")
    tf.saved_model.save(tf.saved_model.load(folder / "files-export"), folder / "files-again")
    return {f"files-{how}": ("serve", [request], answer) for how in ("keras", "export", "again")}


def not_training(model):
    return lambda inputs: model(inputs, training=False)


def specs(request):
    return tf.nest.map_structure(
        lambda t: keras.InputSpec(t.dtype.name, [None, *t.shape[1:]]), request
    )


@pytest.mark.parametrize("how", ["import", "library"])
def test_a_new_process_returns_the_same_bits(tmp_path, exported, how):
    how = str(_ops.library_path(tf.__version__)) if how == "library" else how
    jobs = [(path, endpoint, pack(arguments)) for path, endpoint, arguments, _ in exported]
    for case, found in zip(exported, in_new_process(how, jobs, tmp_path), strict=True):
        assert_same_bits(found, case[-1])


def saved(folder, name="module"):
    """Saves the module of the zoo; returns the path, a request, and the answer."""
    made, request = zoo.module()
    path = str(folder / name)
    tf.saved_model.save(made, path, signatures={"rows": made.rows})
    return path, request[0], made.rows(request[0])


def files_that_are_mapped(path):
    maps = pathlib.Path("/proc/self/maps").read_text()
    return sorted({line.split()[-1] for line in maps.splitlines() if path in line})


def test_a_session(tmp_path):
    """As TensorFlow Serving and the C API run a model: each run executes the whole graph."""
    path, request, answer = saved(tmp_path)
    for _ in range(2):
        with tf.compat.v1.Session(graph=tf.Graph()) as session:
            meta = tf.compat.v1.saved_model.load(session, ["serve"], path)
            signature = meta.signature_def["rows"]
            (given,), (wanted,) = signature.inputs.values(), signature.outputs.values()
            for _ in range(3):
                found = session.run(wanted.name, {given.name: request.numpy()})
                assert_same_bits(found, answer)


def test_loading_inserts_nothing_and_stays_read_only(tmp_path):
    path, request, answer = saved(tmp_path)
    loaded = tf.saved_model.load(path)
    size = int(_ops.library().dynemb_size(loaded.user.served.handle))
    assert_same_bits(loaded.rows(request), answer)
    assert int(_ops.library().dynemb_size(loaded.user.served.handle)) == size == 40
    assert sorted(p.name for p in pathlib.Path(path).iterdir()) == [
        "assets",
        "assets.extra",
        "fingerprint.pb",
        "saved_model.pb",
        "variables",
    ]


@pytest.mark.parametrize("again", [False, True])
def test_two_versions_share_a_process(tmp_path, again):
    """A model that is loaded twice, or two versions: the tables do not mix, and are freed."""
    path, request, answer = saved(tmp_path)
    if not again:
        made, _ = zoo.module()
        made.user.upsert(zoo.KNOWN, np.zeros([40, 4]))
        tf.saved_model.save(made, tmp_path / "other", signatures={"rows": made.rows})
    first = tf.saved_model.load(path)
    second = tf.saved_model.load(path if again else str(tmp_path / "other"))
    assert_same_bits(first.rows(request), answer)
    assert_same_bits(second.rows(request), answer if again else made.rows(request))
    assert files_that_are_mapped(path)
    del first
    gc.collect()
    assert bool(files_that_are_mapped(path)) == again
    if again:
        assert_same_bits(second.rows(request), answer)
    del second
    gc.collect()
    assert files_that_are_mapped(str(tmp_path)) == []


def test_the_model_that_was_exported_trains_on(tmp_path):
    """An export changes neither the table nor later checkpoints, which contain all rows."""
    made, _ = zoo.module()
    before = made.user.lookup(zoo.KNOWN)
    tf.saved_model.save(made, tmp_path / "model")
    made.user.upsert([1000], [[1.0, 2.0, 3.0, 4.0]])
    tf.train.Checkpoint(made).write(str(tmp_path / "checkpoint"))
    other, _ = zoo.module()
    other.user.clear()
    tf.train.Checkpoint(other).read(str(tmp_path / "checkpoint")).assert_consumed()
    assert_same_bits(other.user.lookup(zoo.KNOWN), before)
    assert len(other.user) == 41
    # An export can be continued by a delta, like any dump.
    path = tmp_path / "model" / "assets.extra" / "tf_dynemb"
    de.incremental_dump(path, tables_of(made))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert loaded.serve is not None
    found = _ops.library().dynemb_lookup(
        loaded.user.served.handle, np.array([1000]), tf.zeros([0]), insert=False
    )
    assert found[0].numpy().tolist() == [[1, 2, 3, 4]]


def tables_of(module):
    return {"user": module.user, "item": module.item, "user_1": module.other["a"]}


def test_an_export_that_replaces_another(tmp_path):
    """A process that has loaded the old one goes on; the next load has the new one."""
    path, request, answer = saved(tmp_path)
    loaded = tf.saved_model.load(path)
    made, _ = zoo.module()
    made.user.upsert(zoo.KNOWN, np.ones([40, 4]))
    tf.saved_model.save(made, path, signatures={"rows": made.rows})
    assert_same_bits(loaded.rows(request), answer)
    assert_same_bits(tf.saved_model.load(path).rows(request), made.rows(request))
    assert len(list(pathlib.Path(path, "assets.extra", "tf_dynemb").glob("*base*"))) == 1


def test_a_model_without_its_tables(tmp_path):
    path, _, _ = saved(tmp_path)
    extra = pathlib.Path(path, "assets.extra")
    shutil.rmtree(extra)
    with pytest.raises(tf.errors.DataLossError, match=f"{extra}/tf_dynemb holds no snapshot"):
        tf.saved_model.load(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A module with a table and a variable, saved by TensorFlow and by us."""
    folder = tmp_path_factory.mktemp("small")
    made = tf.Module()
    made.table, made.weight = de.DynamicVariable(2, "ones", "host", name="user"), tf.Variable(2.0)
    made.table.upsert([1], [[3.0, 4.0]])
    made.serve = tf.function(
        lambda ids: made.weight * made.table.lookup(ids, insert=False),
        input_signature=[tf.TensorSpec([None], tf.int64)],
    )
    tf.saved_model.save(made, folder / "saved")
    de.export_saved_model(made, folder / "exported")
    return folder


@pytest.mark.parametrize(
    "name", ["variables/variables.data-00000-of-00001", "assets/tf_dynemb.json"]
)
@pytest.mark.parametrize("how", ["saved", "exported"])
def test_a_file_that_is_missing(tmp_path, small, how, name):
    path = tmp_path / "model"
    shutil.copytree(small / how, path)
    (path / name).unlink()
    with pytest.raises(tf.errors.OpError, match=f"{path / name}"):
        tf.saved_model.load(str(path))


@pytest.mark.parametrize(
    "name",
    [
        "assets/tf_dynemb.json",
        "assets.extra/tf_dynemb/*/MANIFEST.json",
        "assets.extra/tf_dynemb.checksums.json",
    ],
)
def test_a_file_of_a_later_version(tmp_path, small, name):
    """The checksums are right, as in a sound file."""
    path = tmp_path / "model"
    shutil.copytree(small / "exported", path)
    (file,) = path.glob(name)
    members = json.loads(file.read_text())
    members["version"] = 9
    if members.pop("crc32c", None):
        members["crc32c"] = f"{checksum_of(members):08x}"
    file.write_text(json.dumps(members))
    if file.name == "tf_dynemb.json":
        checksums.write(path)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{file} is of version 9"):
        tf.saved_model.load(str(path))


def test_an_export_that_fails_leaves_no_tables(tmp_path):
    """A disk that is full: here a file of the size that the process may write."""
    made, _ = zoo.module()
    made.user.upsert(np.arange(5000), np.ones([5000, 4]))
    with no_files_above(60_000), pytest.raises(OSError, match=r"\.npy"):
        tf.saved_model.save(made, tmp_path / "model")
    assert not (tmp_path / "model" / "saved_model.pb").exists()
    assert not (tmp_path / "model" / "assets.extra" / "tf_dynemb").exists()
    tf.saved_model.save(made, tmp_path / "model")
    assert tf.saved_model.load(str(tmp_path / "model")).user


def test_a_loaded_model_beside_a_table_of_this_process(tmp_path):
    """Two sources of rows in one export."""
    path, request, answer = saved(tmp_path)
    made = tf.Module()
    made.loaded = tf.saved_model.load(path)
    made.table = de.DynamicVariable(2, "ones", "host", name="user")
    made.table.upsert([1], [[7.0, 8.0]])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def both(ids):
        return made.loaded.rows(ids), made.table.lookup(ids, insert=False)

    made.both = both
    tf.saved_model.save(made, tmp_path / "both")
    shutil.rmtree(path)
    found = tf.saved_model.load(str(tmp_path / "both")).both(request)
    assert_same_bits(found, (answer, made.table.lookup(request, insert=False)))


def test_deltas_that_were_applied_to_a_loaded_model(tmp_path):
    """They are not in a copy, which says so."""
    path, _, _ = saved(tmp_path)
    made, _ = zoo.module()
    extra = pathlib.Path(path, "assets.extra", "tf_dynemb")
    loaded = tf.saved_model.load(path)
    tables = tables_of(made)
    de.load(extra, tables)
    made.user.upsert([5], [[1.0, 1.0, 1.0, 1.0]])
    de.incremental_dump(tmp_path / "deltas", tables, since=watermark_of(extra))
    assert int(
        _ops.library().dynemb_apply_snapshots(loaded.user.served.handle, str(tmp_path / "deltas"))
    )
    with pytest.warns(UserWarning, match="is saved as it was exported"):
        tf.saved_model.save(loaded, tmp_path / "copy")


def watermark_of(path):
    """The watermark of the last snapshot of a chain."""
    last = de.storage.Chain.open(path).last.manifest
    return de.Watermark.at(last.id, last.watermark, last.watermark_utc_ns)


@contextlib.contextmanager
def no_files_above(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
