"""export_saved_model: a model for serving, and where its tables come from."""

from __future__ import annotations

import os
import pathlib
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_dynemb import _ops, communicator, storage
from tf_dynemb.saved_models import writing
from tf_dynemb.snapshots.watermark import Watermark
from tf_dynemb.variables import served
from tf_dynemb.variables.dynamic import DynamicVariable

TABLES = ("copy", "link", "external")


def export_saved_model(
    model: Any,
    path: str | os.PathLike[str],
    tables: str = "copy",
    dump: str | os.PathLike[str] | None = None,
    *,
    signatures: Any = None,
    input_signature: Any = None,
    follow: str | os.PathLike[str] | None = None,
    follow_seconds: float = 1.0,
) -> Watermark:
    """Exports a model as a SavedModel for serving, as `model.export(path)` does, with options.

    The tables of the SavedModel are read-only and mapped into memory. The SavedModel appears at
    `path` as a whole, or not at all; it replaces a SavedModel that is there.

    Besides those of the model, it has a signature `apply_delta` with the input `path`, a string:
    the path of a delta, or of a chain. It applies all snapshots there that the tables do not have,
    and returns `applied`, their number, `id` and `watermark` of the last snapshot applied. Requests
    that run at that time are not disturbed, and see all tables as of one snapshot. As an attribute
    of the object that `tf.saved_model.load` returns, it is `loaded.signatures["apply_delta"]`.

    Args:
        model: a Keras model, which gets the endpoint `serve`; or a `tf.Module`.
        path: the directory of the SavedModel.
        tables: where the tables of the SavedModel are.

            - "copy": in it. The rows are those of now, or of `dump`.
            - "link": in it, as hard links to the files of `dump`. Versions that link one dump share
              disk and memory. Both must be on one file system.
            - "external": at `dump`. The SavedModel has its absolute path.
        dump: a chain of snapshots that has all dynamic tables of the model, by their names (or one
            base): a path that `tf_dynemb.dump` has written to.
        signatures: of a `tf.Module`, as in `tf.saved_model.save`.
        input_signature: of a Keras model, as in `model.export`. Default: its inputs; sparse and
            ragged ones stay so.
        follow: a path that the loaded model polls, to apply each snapshot that is published there:
            another base, or deltas that continue the tables. Default: none. A relative path is
            relative to the current directory of the process that exports.
        follow_seconds: the time between two polls.

    Returns:
        The watermark of the rows. Deltas for the SavedModel continue it: pass it to
        `incremental_dump` as `since`.

    Raises:
        ValueError: `tables` has another value, or needs a `dump`; or the dump has other tables than
            the model, or the model has none; or `follow_seconds` is not positive; or `signatures`
            is passed for a Keras model, or `input_signature` for another.
        FileExistsError: there is something at `path` that is not a SavedModel.
        FileNotFoundError: there is no snapshot at `dump`.
        tf_dynemb.storage.DataLossError: a snapshot at `dump` is damaged.
        OSError: an error of the file system, such as a full disk, or a link to another file system.
        RuntimeError: there are several ranks.
    """
    if communicator.get().size > 1:
        raise RuntimeError(
            "export_saved_model works in one process: dump the tables on all ranks, load the dump "
            "in one process, and export the model there."
        )
    if tables not in TABLES:
        raise ValueError(f"tables must be one of {', '.join(TABLES)}, got {tables!r}.")
    if dump is None and tables != "copy":
        raise ValueError(f"tables={tables!r} needs dump, the path of the snapshots.")
    if not follow_seconds > 0:
        raise ValueError(f"follow_seconds must be positive, got {follow_seconds!r}.")
    is_keras = isinstance(model, keras.layers.Layer)
    if (signatures if is_keras else input_signature) is not None:
        wrong = "signatures is for a tf.Module" if is_keras else "input_signature is for Keras"
        raise ValueError(f"{wrong}, got it for {type(model).__name__}.")
    table = _any_table(model)
    path = pathlib.Path(path)
    _check_free(path)
    members: dict[str, Any] = {}
    if follow is not None:
        members = {"follow": os.path.abspath(follow), "follow_seconds": float(follow_seconds)}
    rows = served.Rows(tables, None if dump is None else pathlib.Path(dump).absolute(), members)
    if rows.path is not None:
        storage.Chain.open(rows.path)  # raises now if there is nothing
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    token = served.ROWS.set(rows)
    try:
        if is_keras:
            _save_keras(model, unfinished, input_signature, table)
        else:
            _save_module(model, unfinished, signatures, table)
        watermark = _watermark(rows, unfinished)
        _move(unfinished, path)
    finally:
        served.ROWS.reset(token)
        shutil.rmtree(unfinished, ignore_errors=True)
    return watermark


def _any_table(model: Any) -> DynamicVariable:
    """Returns a table of the model; raises ValueError if it has none."""
    for found in tf.train.TrackableView(model).descendants():
        for each in (found, getattr(found, "_value", None)):
            if isinstance(each, DynamicVariable):
                return each
    raise ValueError(
        f"{model!r:.120} has no dynamic tables. If they are attributes of a layer that has not "
        "been called yet, call it once."
    )


def _check_free(path: pathlib.Path) -> None:
    if not path.exists() or (path / "saved_model.pb").exists():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise FileExistsError(f"{path} exists, and is not a SavedModel.")


def _delta_function(table: DynamicVariable) -> Any:
    def apply_delta(path: Any) -> dict[str, Any]:
        library = _ops.library()
        applied = library.dynemb_apply_snapshots(table.handle, path)
        with tf.control_dependencies([applied]):
            state = library.dynemb_served_state(table.handle)
        return {"applied": applied, "id": state.id, "watermark": state.watermark}

    spec = tf.TensorSpec([], tf.string, name="path")
    return tf.function(apply_delta, input_signature=[spec], autograph=False)


def _save_keras(
    model: Any, path: pathlib.Path, input_signature: Any, table: DynamicVariable
) -> None:
    if input_signature is None:
        inputs = getattr(model, "_inputs_struct", None)
        if inputs is None:
            raise ValueError(
                f"input_signature is required for {model.name}, whose inputs Keras does not know."
            )
        input_signature = [inputs]
    signature = keras.tree.map_structure(_spec, input_signature)
    archive = keras.export.ExportArchive()
    archive.track(model)

    def serve(*inputs: Any) -> Any:
        return model(*inputs, training=False)

    archive.add_endpoint("serve", tf.function(serve, input_signature=signature, autograph=False))
    archive.add_endpoint("apply_delta", _delta_function(table))
    archive.write_out(str(path), verbose=False)


def _spec(value: Any) -> Any:
    if isinstance(value, tf.TypeSpec):
        return value
    shape, dtype = list(value.shape), value.dtype
    if getattr(value, "sparse", False):
        return tf.SparseTensorSpec(shape, dtype)
    if getattr(value, "ragged", False):
        return tf.RaggedTensorSpec(shape, dtype, len(shape) - 1)
    return tf.TensorSpec(shape, dtype, name=value.name)


def _save_module(model: Any, path: pathlib.Path, signatures: Any, table: DynamicVariable) -> None:
    if signatures is None:
        signatures = {}
    elif not isinstance(signatures, Mapping):
        signatures = {"serving_default": signatures}
    if "apply_delta" in signatures:
        raise ValueError("signatures must not have the name 'apply_delta'.")
    tf.saved_model.save(
        model, str(path), signatures={**signatures, "apply_delta": _delta_function(table)}
    )


def _watermark(rows: served.Rows, folder: pathlib.Path) -> Watermark:
    path = folder / served.EXTRA / served.FOLDER
    if rows.how == "external" and rows.path is not None:
        path = rows.path
    return Watermark.of(storage.Chain.open(path).last.manifest)


def _move(unfinished: pathlib.Path, path: pathlib.Path) -> None:
    """Puts a SavedModel in its place."""
    writing.sync(unfinished)
    if path.exists():
        old = unfinished.with_name(unfinished.name + ".old")
        os.rename(path, old)
        os.rename(unfinished, path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(unfinished, path)
