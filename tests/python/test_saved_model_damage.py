"""Damaged and changed exports that TensorFlow loads, and exports to a full disk.

`test_damage.py` opens the tables of damaged exports.
"""

import pathlib
import pickle
import shutil

import numpy as np
import pytest
import tensorflow as tf
import warm_python
from damage_readers import Exported, make_model
from storage_helpers import flip
from test_saved_models import no_files_above

import tf_dynemb as de

CHECKSUMS = pathlib.Path("assets.extra", "tf_dynemb.checksums.json")
IDS = np.array([[1, 2, 3], [-1, 50, 2**40]])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, and the path of its export."""
    made = Exported(tmp_path_factory.mktemp("exported"))
    return made.model, made.path


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


CLIENT = """
import pickle, sys
import numpy as np, tensorflow as tf
tf.load_op_library(sys.argv[1])
ids = tf.constant(pickle.load(open(sys.argv[2], "rb")))
for number, path in enumerate(sys.argv[3:]):
    print("\\nCOPY", number, flush=True)
    try:
        loaded = tf.saved_model.load(path)
        answer = loaded.signatures["serving_default"](ids=ids)
        print("ANSWER", next(iter(answer.values())).numpy().tobytes().hex(), flush=True)
    except Exception as error:
        print("ERROR", type(error).__name__, repr(str(error)), flush=True)
"""


def load_each(paths, tmp_path):
    """Loads models in another process. Returns what it says about each, or "CRASH"."""
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "ids").write_bytes(pickle.dumps(IDS))
    library, results = str(de._ops.library_path(tf.__version__)), []
    while len(results) < len(paths):
        command = [str(tmp_path / "client.py"), library, str(tmp_path / "ids")]
        command += [str(path) for path in paths[len(results) :]]
        done = warm_python.run(command)
        said = [part.split("\n", 1)[1].strip() for part in done.stdout.split("\nCOPY ")[1:]]
        assert said, done.stderr[-2000:]
        results += [each or "CRASH" for each in said]
    return results


UNNAMED = ("saved_model.pb", "variables/variables.index")

# Files, and how many bytes of each are flipped.
THROUGH_TENSORFLOW = {
    "saved_model.pb": 24,
    "fingerprint.pb": 3,
    "variables/variables.index": 6,
    "variables/variables.data-00000-of-00001": 6,
    "assets/tf_dynemb.json": 3,
}


@pytest.mark.slow
def test_damage_through_the_loader_of_tensorflow(exported, tmp_path):
    """No answer comes out, even if TensorFlow reads a damaged file without an error."""
    model, path = exported
    answer = f"ANSWER {model.predict(IDS, verbose=0).tobytes().hex()}"
    rng, copies = np.random.default_rng(3), {}
    for name, count in THROUGH_TENSORFLOW.items():
        size = (path / name).stat().st_size
        for offset in rng.choice(size, count, replace=False).tolist():
            copy = tmp_path / str(len(copies))
            shutil.copytree(path, copy)
            flip(copy / name, offset)
            copies[copy] = name
    sound, *results = load_each([path, *copies], tmp_path)
    assert sound == answer
    unnamed = 0
    for (copy, name), result in zip(copies.items(), results, strict=True):
        assert result.startswith(("ERROR", "CRASH")), (name, result)
        # TensorFlow's own errors need not name the file.
        assert str(copy) in result or name in UNNAMED, (name, result)
        unnamed += str(copy) not in result
    assert unnamed < 20


def test_a_bit_that_would_change_answers(exported, tmp_path):
    """Initial vectors between -0.05 and 0.05 become ones between -0.15 and 0.05."""
    model, path = exported
    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    file = damaged / "saved_model.pb"
    content = bytearray(file.read_bytes())
    offset = content.index(b"-0.05", content.index(b'"initializer_args": [')) + len("-0.")
    content[offset] ^= 1
    file.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError, match=f"{file} is damaged: its CRC32C"):
        tf.saved_model.load(str(damaged))
    (damaged / CHECKSUMS).unlink()
    loaded = tf.saved_model.load(str(damaged))
    assert loaded.serve(IDS).numpy().tobytes() != model.predict(IDS, verbose=0).tobytes()


def test_a_model_that_a_tool_has_changed(exported, tmp_path):
    """The error says what to do, after which the model loads."""
    model, path = exported
    changed = tmp_path / "changed"
    shutil.copytree(path, changed)
    from tensorflow.core.protobuf import saved_model_pb2

    file = changed / "saved_model.pb"
    graph = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    graph.meta_graphs[0].meta_info_def.tags.append("another")
    file.write_bytes(graph.SerializeToString())
    with pytest.raises(tf.errors.DataLossError, match=rf"{file} is damaged.*remove that file"):
        tf.saved_model.load(str(changed))
    (changed / CHECKSUMS).unlink()
    loaded = tf.saved_model.load(str(changed))
    assert loaded.serve(IDS).numpy().tobytes() == model.predict(IDS, verbose=0).tobytes()


def test_a_model_that_is_saved_again(exported, tmp_path):
    """Elsewhere, and in place of an export with checksums."""
    model, path = exported
    answer = model.predict(IDS, verbose=0).tobytes()
    again = tmp_path / "again"
    shutil.copytree(path, again)
    for _ in range(2):
        tf.saved_model.save(tf.saved_model.load(str(path)), str(again))
        assert not (again / CHECKSUMS).exists()
        loaded = tf.saved_model.load(str(again))
        assert loaded.serve(IDS).numpy().tobytes() == answer
    shutil.rmtree(again)
    shutil.copytree(path, again)
    model.export(again, verbose=False)
    loaded = tf.saved_model.load(str(again))
    assert loaded.serve(IDS).numpy().tobytes() == answer


@pytest.mark.parametrize("limit", [2_000, 20_000])
def test_a_full_disk(tmp_path, limit):
    """Nothing is left of an export whose variables, or whose graph, do not fit."""
    model, path = make_model(), tmp_path / "model"
    with no_files_above(limit), pytest.raises((OSError, tf.errors.OpError)):
        de.export_saved_model(model, path)
    assert list(tmp_path.iterdir()) == []
    de.export_saved_model(model, path)
    assert files_of(path) != []
