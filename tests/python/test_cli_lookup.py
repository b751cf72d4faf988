"""The command lookup, SavedModels as paths, and what a script sees of a closed pipe."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from chain_writer import Change, Row, publish
from cli_helpers import fails, run, write_chain

import tf_dynemb as de
from tf_dynemb import cli
from tf_dynemb.storage import Chain


@pytest.fixture
def path(tmp_path):
    write_chain(tmp_path / "chain")
    return tmp_path / "chain"


def test_lookup(capsys, path):
    code, out = run(capsys, "lookup", path, "2", "-3", "5", "--table", "user")
    assert code == 0
    head, *lines = (line.split() for line in out.splitlines())
    assert head == ["key", "row", "vector"]
    assert lines[0] == ["2", "yes", "20.0", "20.0"]
    assert lines[1][:2] == ["-3", "no"]
    assert len(lines[1]) == 4  # the vector that the model reads
    assert lines[2] == ["5", "yes", "50.0", "50.0"]


def test_options_and_keys_in_any_order(capsys, path):
    expected = run(capsys, "lookup", path, "2", "-3", "--table", "user")
    for arguments in (
        [path, "--table", "user", "2", "-3"],
        ["--table", "user", path, "2", "-3"],
        [path, "2", "--table", "user", "-3"],
        [path, "--table", "user", "--", "2", "-3"],
    ):
        assert run(capsys, "lookup", *arguments) == expected


def test_lookup_json_and_file(capsys, path, tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(b"2\r\n\n 18446744073709551615 \n")
    arguments = ["lookup", path, "1", "--key-file", file, "--table", "item/ü", "--json"]
    code, out = run(capsys, *arguments)
    assert code == 0
    found = json.loads(out)
    assert (found["table"], found["id"]) == ("item/ü", Chain.open(path).last.manifest.id)
    assert [row["key"] for row in found["rows"]] == [1, 2, 2**64 - 1]
    assert [row["row"] for row in found["rows"]] == [True, True, False]
    assert found["rows"][1]["vector"] == [20.0] * 3


def test_lookup_of_standard_input(capsys, path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"4\n5\n")))
    code, out = run(capsys, "lookup", path, "--key-file", "-", "--table", "user")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["key", "4", "5"]


def test_lookup_errors(capsys, path):
    assert "no keys" in fails(capsys, 2, "lookup", path, "--table", "user")
    assert "'user', 'item/ü'" in fails(capsys, 2, "lookup", path, "1")
    assert "'x'" in fails(capsys, 2, "lookup", path, "1", "--table", "x")
    error = fails(capsys, 2, "lookup", path, "1", "alice", "--table", "user")
    assert "'alice' is not an integer" in error
    assert "'user'" in error
    assert "uint64" in fails(capsys, 2, "lookup", path, "--table", "item/ü", "--", "-1")


def test_lookup_of_numbers_that_are_not_finite(capsys, tmp_path):
    vector = np.array([np.nan, np.inf, 0.1], np.float32)
    publish(tmp_path, "base", {"t": Change({1: Row(vector)})}, watermark=1)
    out = run(capsys, "lookup", tmp_path, "1", "--json")[1]
    assert json.loads(out)["rows"][0]["vector"] == [None, None, float(np.float32(0.1))]
    assert run(capsys, "lookup", tmp_path, "1")[1].splitlines()[1].split()[2:] == [
        "nan",
        "inf",
        "0.1",
    ]


STRINGS = ["alice", "Zoë 花子", "-x", "12"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model whose ids are strings, its dump, and two SavedModels of it."""
    folder = tmp_path_factory.mktemp("models")
    inputs = keras.Input((1,), dtype="string")
    layer = de.layers.Embedding(3, hash_strings=True, name="user")
    model = keras.Model(inputs, keras.layers.Flatten()(layer(inputs)))
    layer(tf.constant([STRINGS]), training=True)
    de.dump(folder / "dump", model)
    de.export_saved_model(model, folder / "copy", follow=folder / "dump")
    de.export_saved_model(model, folder / "external", "external", folder / "dump")
    return folder, layer


@pytest.mark.parametrize("place", ["dump", "copy", "external"])
def test_lookup_of_strings(capsys, models, place, tmp_path):
    folder, layer = models
    expected = layer(tf.constant([STRINGS])).numpy()[0]
    file = tmp_path / "strings"
    file.write_bytes("\n".join(STRINGS).encode())
    out = run(capsys, "lookup", folder / place, "bob", "--key-file", file, "--json")[1]
    bob, *rows = json.loads(out)["rows"]
    assert [row["key"] for row in rows] == STRINGS
    assert [row["row"] for row in rows] == [True] * 4
    np.testing.assert_array_equal(np.float32([row["vector"] for row in rows]), expected)
    assert (bob["key"], bob["row"]) == ("bob", False)
    hashed = int(tf.strings.to_hash_bucket_fast("12", 2**63 - 1))
    out = run(capsys, "lookup", folder / place, hashed, "12", "--integer-keys", "--json")[1]
    assert [(row["key"], row["row"]) for row in json.loads(out)["rows"]] == [
        (hashed, True),
        (12, False),
    ]


def test_inspect_of_a_saved_model(capsys, models):
    folder, _ = models
    out = run(capsys, "inspect", folder / "copy")[1]
    inside = folder / "copy" / "assets.extra" / "tf_dynemb"
    assert f"tables in the SavedModel: {inside}\nfollows: {folder / 'dump'}\n" in out
    assert "import tf_dynemb before tf.saved_model.load" in out
    assert "\nname" in out
    (tables,) = json.loads(run(capsys, "inspect", folder / "copy", "--json")[1])["saved_model"]
    assert (tables["tables"], tables["inside"]) == (str(inside), True)
    assert tables["follow"] == str(folder / "dump")
    assert tables["snapshots"][0]["tables"][0]["rows"] == 4
    out = run(capsys, "inspect", folder / "external")[1]
    assert f"tables outside of the SavedModel: {folder / 'dump'}\nfollows: nothing\n" in out


def test_other_commands_on_saved_models(capsys, models, tmp_path):
    folder, _ = models
    assert run(capsys, "verify", folder / "copy")[0] == 0
    assert run(capsys, "diff", folder / "copy", folder / "external")[0] == 0
    assert run(capsys, "export", folder / "copy", tmp_path / "x.npz")[0] == 0


def test_a_saved_model_without_tables(capsys, tmp_path):
    module = tf.Module()
    module.f = tf.function(lambda x: x + 1, input_signature=[tf.TensorSpec([], tf.int64)])
    tf.saved_model.save(module, str(tmp_path))
    assert "without tables" in run(capsys, "inspect", tmp_path)[1]
    assert "none" in fails(capsys, 2, "verify", tmp_path)


COMMAND = [sys.executable, "-m", "tf_dynemb"]


def finished(arguments, **streams):
    """Runs the command line; returns the exit status that a shell sees."""
    with subprocess.Popen([*COMMAND, *map(str, arguments)], **streams) as process:
        return process.wait(timeout=60)


def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.fixture
def other(path, tmp_path):
    """A chain that differs from `path`."""
    held = {"user": Change({}), "item/ü": Change({})}
    publish(tmp_path / "other", "base", held, watermark=1)
    return tmp_path / "other"


@pytest.mark.parametrize("differs", [False, True])
def test_diff_into_a_closed_pipe_says_neither(path, other, differs):
    pipe = closed_pipe()
    code = finished(["diff", path, other if differs else path], stdout=pipe)
    os.close(pipe)
    assert code == 141


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_other_commands_into_a_closed_pipe(path, command):
    pipe = closed_pipe()
    assert finished([command, path], stdout=pipe, stderr=subprocess.DEVNULL) == 141
    os.close(pipe)


def test_errors_into_a_closed_pipe(path, tmp_path):
    pipe = closed_pipe()
    assert finished(["diff", path, tmp_path / "no"], stdout=pipe, stderr=pipe) == 2
    os.close(pipe)


def test_output_that_cannot_be_written(path, other):
    with open("/dev/full", "wb") as full:
        assert finished(["diff", path, path], stdout=full, stderr=subprocess.DEVNULL) == 2
        assert finished(["diff", path, other], stdout=full, stderr=full) == 2


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_closed_streams(path, other, closed):
    """As a shell's `>&-`: the exit status is the answer all the same."""
    closes = " ".join(f"{number}>&-" for number in closed.split())
    for second, expected in ((path, 0), (other, 1), (other / "no", 2)):
        line = f'exec "$@" {closes}'
        process = subprocess.run(
            ["sh", "-c", line, "sh", *COMMAND, "diff", str(path), str(second)],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert process.returncode == expected


def test_an_unexpected_error_is_no_difference(capsys, path, monkeypatch):
    def fail(*_):
        raise MemoryError("planted")

    monkeypatch.setattr(Chain, "open", fail)
    assert cli.main(["diff", str(path), str(path)]) == 2
    assert "MemoryError: planted" in capsys.readouterr().err
