"""Functions refuse URLs that they do not know, and create nothing.

`test_url_chains.py` tests those that know `s3://` and the like.
"""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from chain_writer import Change, Row, publish

import tf_dynemb as de
from tf_dynemb import _presence, cli, oneembedding, storage, tfra
from tf_dynemb.chains import merge
from tf_dynemb.sok.dump import read_sok_dump
from tf_dynemb.storage import publication

OF_STORES = (
    "s3://bucket/x",
    "hdfs://namenode:9000/x",
    "hdfs:///user/x",
    "gs://bucket/x",
    "https://host/x",
)
OF_NONE = (
    "dbfs:/x",
    "file://host/x",
    pathlib.Path("s3://bucket/x"),
    pathlib.Path("file://host/x"),
)


def tables():
    return [de.DynamicVariable(2, name="t")]


def tfra_table():
    return tfra.get_variable("t", dim=2)


def model():
    table = de.DynamicVariable(2, name="t")
    module = tf.Module()
    module.table = table
    module.__call__ = tf.function(
        lambda ids: tf.nn.embedding_lookup(table, ids),
        input_signature=[tf.TensorSpec([None], tf.int64)],
    )
    return module


# Functions whose path can be in a store.
OF_CHAINS = {
    "dump": ("path", lambda url: de.dump(url, tables())),
    "incremental_dump": ("path", lambda url: de.incremental_dump(url, tables())),
    "load": ("path", lambda url: de.load(url, tables())),
    "apply_delta": ("path", lambda url: de.apply_delta(url, tables())),
    "export dump": ("dump", lambda url: de.export_saved_model(model(), "m", "copy", url)),
    "Reader": ("path", lambda url: de.serving.Reader(url)),
    "follow": ("path", lambda url: de.serving.Reader(_chain()).follow(url)),
    "Chain": ("path", storage.Chain.open),
    "Publication": ("path", lambda url: storage.Publication(url, "base")),
    "merge": ("path", merge.merge),
    "rollback": ("path", lambda url: merge.rollback(url, "0")),
    "prune": ("path", publication.prune),
    "merge out": ("out", lambda url: merge.merge(_chain(), url)),
    "Publish": ("path", de.callbacks.Publish),
}
LOCAL = {
    "export path": ("path", lambda url: de.export_saved_model(model(), url)),
    "export link": ("dump", lambda url: de.export_saved_model(model(), "m", "link", url)),
    "export follow": ("follow", lambda url: de.export_saved_model(model(), "m", follow=url)),
    "file_path": ("file_path", lambda url: de.DynamicVariable(2, var_type="file", file_path=url)),
    "layer": ("file_path", lambda url: de.layers.Embedding(2, var_type="file", file_path=url)),
    "load_sok_dump": ("directory", lambda url: de.load_sok_dump(url, tables())),
    "read_sok_dump": ("directory", read_sok_dump),
    "one_embedding": (
        "persistent_path",
        lambda url: oneembedding.make_device_mem_store_options(url, capacity=10),
    ),
    "one_embedding list": (
        "persistent_path",
        lambda url: oneembedding.make_cached_ssd_store_options(1, persistent_path=[url]),
    ),
    "tfra save": ("dirpath", lambda url: tfra_table().save_to_file_system(url)),
    "tfra load": ("dirpath", lambda url: tfra_table().load_from_file_system(url)),
}


def _chain():
    folder = pathlib.Path("chain")
    if not folder.exists():
        publish(folder, "base", {"t": Change({1: Row(np.ones(3, np.float32))})}, watermark=1)
    return folder


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("door", [*OF_CHAINS, *LOCAL])
def test_a_url_is_refused(tmp_path, door):
    argument, call = {**OF_CHAINS, **LOCAL}[door]
    for url in OF_NONE if door in OF_CHAINS else (*OF_STORES, *OF_NONE):
        what = "mounted|polls a local path|needs a local dump|pass it as a str"
        with pytest.raises(ValueError, match=f"({argument}='.*'|tables=).*({what})"):
            call(url)
    assert {entry.name for entry in tmp_path.iterdir()} <= {"chain"}


def test_dbfs_is_mounted():
    with pytest.raises(ValueError, match=r"\(/dbfs/models/x\)"):
        _presence.local_path("dbfs:/models/x", "path")
    with pytest.raises(ValueError, match=r"\(/dbfs/models/x\)"):
        _presence.local_path("dbfs://models/x", "path")


def test_tensorflow_saves_no_rows_beside_a_url(tmp_path):
    """TensorFlow takes `dbfs:/x` for a folder, and writes its own files there."""
    with pytest.raises(ValueError, match="export_dir='dbfs:/x' is a URL"):
        tf.saved_model.save(model(), "dbfs:/x")
    assert list(tmp_path.rglob("*.npy")) == []


COMMANDS = (
    ["export", "chain", "{}"],
    ["audit", "1", "{}"],
    ["forget", "{}", "--keys", "1"],
    ["lookup", "chain", "--key-file", "{}"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_command_line_refuses_urls(capsys, tmp_path, command):
    _chain()
    with pytest.raises(SystemExit) as caught:
        cli.main([argument.format("s3://bucket/x") for argument in command])
    assert caught.value.code == 2
    assert "='s3://bucket/x' is a URL" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["chain"]


@pytest.mark.parametrize(
    "name", ["a:b", "C:/x", "s3:", "x/s3:/y", "./s3:/y", "2026-11-27T10:00", ":/"]
)
def test_names_with_colons_are_paths(tmp_path, name):
    assert _presence.local_path(name, "path").absolute() == tmp_path / name
    if name != ":/":
        pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
    table = de.DynamicVariable(2, name="t")
    table.lookup([1, 2])
    de.dump(name, [table])
    assert (tmp_path / name / "LOCK").exists()
    assert de.serving.Reader(name).size() == 2


@pytest.mark.parametrize("form", ["file://{}", "file:{}", "file://localhost{}", "FILE://{}"])
def test_urls_of_local_files(tmp_path, form):
    folder = tmp_path / "a b%c"
    url = form.format(str(folder).replace("%", "%25").replace(" ", "%20"))
    assert _presence.local_path(url, "path") == folder
    table = de.DynamicVariable(2, name="t")
    table.lookup([1, 2])
    de.dump(url, [table])
    table.lookup([3])
    de.incremental_dump(url, [table])
    reader = de.serving.Reader(url)
    assert reader.size() == 3
    assert reader.follow(url) == 0
    de.load(url, [table])
    de.apply_delta(url, [table])
    de.export_saved_model(model(), f"{url}/model", follow=url)
    de.DynamicVariable(2, var_type="file", file_path=f"{url}/rows")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a b%c"]
    assert {entry.name for entry in folder.iterdir()} >= {"LOCK", "model", "rows"}


def test_a_relative_path_stays_one(tmp_path):
    """Keras layers keep the text of `file_path` in their config."""
    layer = de.layers.Embedding(2, var_type="file", file_path="rows")
    assert keras.layers.serialize(layer)["config"]["file_path"] == "rows"
