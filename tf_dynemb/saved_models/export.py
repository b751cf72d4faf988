"""export_saved_model: a model for serving, and where its tables come from.

The rows of now are dumped by all ranks, before rank 0 saves the model, whose saver moves the dump
to its place. The graphs of the model are traced as in one process: graphs for several ranks have
operators that exchange keys and vectors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.saved_model import loader_impl

from tf_dynemb import _ops, communicator, storage
from tf_dynemb._presence import exists, is_directory, is_url, local_path, remove_tree
from tf_dynemb._warn import warn
from tf_dynemb.chains.thinning import formats_by_table
from tf_dynemb.dense.names import Weight
from tf_dynemb.parallel.agreement import Ranks, check_alike
from tf_dynemb.persistence.dump import dump as dump_rows
from tf_dynemb.persistence.naming import described, named_variables
from tf_dynemb.persistence.watermark import Watermark
from tf_dynemb.saved_models import checksums, writing
from tf_dynemb.saved_models.dense_weights import VariableReadError, Weights, reading
from tf_dynemb.storage.local_place import list_snapshots
from tf_dynemb.variables import model_inputs, served
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable

TABLES = ("copy", "link", "external")


def export_saved_model(
    model: keras.Model | tf.Module,
    path: str | os.PathLike[str],
    tables: str = "copy",
    dump: str | os.PathLike[str] | None = None,
    *,
    signatures: Any = None,
    input_signature: Any = None,
    follow: str | os.PathLike[str] | None = None,
    follow_seconds: float = 0.25,
    unrelated: bool = False,
    dense: str | None = "weights",
    part_of: Any = None,
    rows: str | Mapping[str, str] | None = None,
) -> Watermark:
    """Exports a model as a SavedModel for serving, as `model.export(path)` does, with options.

    The tables of the SavedModel are read-only and mapped into memory. The SavedModel appears at
    `path` as a whole, or not at all; it replaces a SavedModel that is there.

    The signature `serving_default` has the outputs of a Keras model by their names: the keys of a
    dict, or the names of the outputs of a functional model with several.

    Besides the model's signatures, it has a signature `apply_delta` with the input `path`, a
    string: the path of a delta, or of a chain. It applies all snapshots there that the tables do
    not have, and returns `applied`, their number, `id` and `watermark` of the last snapshot
    applied. Requests that run at that time are not disturbed, and see all tables and the dense
    weights as of one snapshot. As an attribute of the object that `tf.saved_model.load` returns, it
    is `loaded.signatures["apply_delta"]`.

    A further signature, `watermark`, has no inputs. It returns `id`, `watermark` and
    `watermark_utc_ns` of the last snapshot, and `follow_error`, the error of the last poll of
    `follow` (empty: none). In a `tf.function` that also calls the model, it is the snapshot that
    the model reads.

    With several ranks, all of them call this, between steps. Rank 0 writes the SavedModel, which
    has the rows of all ranks, and rank 0's other weights. It is as one process would export it: a
    process that loads it needs neither Horovod nor other ranks.

    Args:
        model: a Keras model, which gets the endpoint `serve`; or a `tf.Module`.
        path: the directory of the SavedModel, created with those that it is in. All ranks must
            share its file system.
        tables: where the tables of the SavedModel are.

            - "copy": in it, with the rows as they are now, or from `dump`.
            - "link": in it, as hard links to the files of `dump`. Versions that link one dump share
              disk and memory. Both must be on one file system.
            - "external": at `dump`. The SavedModel has its absolute path.
        dump: a chain of snapshots that has all dynamic tables of the model, by their names (or one
            base): a path that `tf_dynemb.dump` has written to; to "copy" them, also a URL.
        signatures: of a `tf.Module`, as in `tf.saved_model.save`.
        input_signature: of a Keras model, as in `model.export`. Default: its inputs, or what it was
            called with; sparse and ragged ones stay so.
        follow: a path that the loaded model polls, to apply each snapshot that is published there:
            another base, or deltas that continue the tables. Default: none. A relative path is
            relative to the current directory of the process that exports.
        follow_seconds: the time between two polls, each of which lists the folder.
        unrelated: whether the loaded model takes bases of other tables than its own, such as the
            tables of a model that was retrained from scratch. Such a base is otherwise an error of
            `apply_delta`, and of polls.
        dense: "weights": the loaded model reads the dense weights of the last snapshot that has
            some, as it reads the rows. A snapshot with other names, dtypes or shapes of weights is
            an error of `apply_delta`, and of polls: the model must be exported again. None: the
            dense weights stay those of this export. So they do, with a warning, in a Keras model
            one of whose weights is not Keras's, is read in a `tf.function` inside a layer, or is
            changed by a call; and in a `tf.Module`. No other thread may call the model meanwhile.
        part_of: what is dumped, if `model` is a part of it, such as one of two towers: another
            model, or a list or dict of models. Dumps name weights, and tables in a dict, by their
            places in it.
        rows: the format of the vectors in the SavedModel, as in `publish`; needs `tables="copy"`.
            The graph stays one of the table's dtype. Rows that the loaded model applies later have
            the format that they are published in: to follow small rows, follow a copy that
            `publish` makes with `rows`.

    Returns:
        The watermark of the rows, the same on all ranks. Deltas for the SavedModel continue it:
        pass it to `incremental_dump` as `since`.

    Raises:
        ValueError: `tables`, `dense` or `rows` has another value, or `tables` needs a `dump`, or
            `rows` does not go with `tables`, or names a table that the model does not have; or the
            dump has other tables than the model, or the model has none; or the snapshots at
            `follow` have other dense weights; or `part_of` does not have those of the model; or
            `follow_seconds` is not positive; or `signatures` or `part_of` does not go with the type
            of the model, or `input_signature`.
        FileExistsError: there is something at `path` that is not a SavedModel.
        FileNotFoundError: there is no snapshot at `dump`.
        tf_dynemb.storage.DataLossError: a snapshot at `dump` is damaged.
        OSError: an error of the file system, such as a full disk, or a link to another file system.
        RuntimeError: it failed on another rank, or was called inside a `tf.function`.
    """
    ranks = Ranks("export_saved_model")
    with ranks.stage() as stage:
        path = local_path(path, "path")
        if follow is not None and is_url(follow):
            raise ValueError(
                f"follow={str(follow)!r}: a loaded model polls a local path. Pass one, and run "
                f"`tf-dynemb publish {follow} PATH --every 1` where it serves."
            )
        source_path = None if dump is None else _source_path(dump, tables)
        follow = None if follow is None else local_path(follow, "follow")
        _check_arguments(model, tables, source_path, signatures, input_signature, follow_seconds)
        if dense not in ("weights", None):
            raise ValueError(f'dense must be "weights" or None, got {dense!r}.')
        dynamic, static = _variables(model)
        named = _named(dynamic, part_of)
        formats = _formats(rows, tables, named)
        weights = _weights(model, dense, part_of, source_path, follow)
        for name in named.keys() & weights.dumped.keys():
            raise ValueError(f"A table and a dense weight are both named {name!r}.")
        if ranks.rank == 0:
            _check_free(path)
            path.parent.mkdir(parents=True, exist_ok=True)
        call = [str(path), tables, str(source_path), str(follow), follow_seconds, bool(unrelated)]
        call += [dense, sorted(formats.items(), key=str)]
        stage.say([[*call, *described(named)], secrets.token_hex(8)])
    calls, tokens = zip(*stage.said, strict=True)
    check_alike(calls, "the arguments and the tables")
    unfinished = path.with_name(f".{path.name}.{tokens[0]}")
    members: dict[str, Any] = {"unrelated": True} if unrelated else {}
    if follow is not None:
        members["follow"] = os.path.abspath(follow)
        members["follow_seconds"] = float(follow_seconds)
    if weights.read:
        members["dense"] = True
    try:
        if source_path is None:
            with ranks.stage():
                if ranks.rank == 0:
                    unfinished.mkdir()
            source = served.Rows("move", unfinished.absolute() / "rows", members, named, formats)
            dump_rows(unfinished / "rows", {**named, **weights.dumped}, dense="weights", quiet=True)
        else:
            known = {} if part_of is None else named
            source = served.Rows(tables, source_path, members, known, formats)
        whole = []
        if ranks.size > 1:
            whole = [each.whole(f"dynemb/whole/{i}") for i, each in enumerate(static)]
        with ranks.stage() as stage, contextlib.ExitStack() as stack:
            if ranks.rank == 0:
                for variable, value in zip(static, whole, strict=False):
                    stack.enter_context(variable.replaced_by(value))
                stack.enter_context(communicator.alone())
                stack.enter_context(_logged_as(unfinished, path))
                last = _last(source.path)  # raises now if there is nothing
                _save(
                    model, unfinished, source, signatures, input_signature, dynamic[0], weights.read
                )
                if source.how in ("copy", "link"):  # a delta may have been published meanwhile
                    last = _last(unfinished / served.EXTRA / served.FOLDER)
                checksums.write(unfinished)
                _move(unfinished, path)
                stage.say([last.id, last.watermark, last.watermark_utc_ns])
    finally:
        if ranks.rank == 0:
            remove_tree(unfinished)
    return Watermark.at(*stage.said[0])


def _source_path(dump: str | os.PathLike[str], tables: str) -> pathlib.Path | str:
    """Returns the path or URL of the rows; raises ValueError if they cannot be used in this way."""
    if not is_url(dump):
        return local_path(dump, "dump").absolute()
    if tables in ("link", "external"):
        raise ValueError(f"tables={tables!r} needs a local dump, got {str(dump)!r}.")
    return str(dump)


def _check_arguments(
    model: keras.Model | tf.Module,
    tables: str,
    dump: pathlib.Path | str | None,
    signatures: Any,
    input_signature: Any,
    follow_seconds: float,
) -> None:
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


def _variables(model: keras.Model | tf.Module) -> tuple[list[DynamicVariable], list[Variable]]:
    """Returns the tables and the static variables of a model, in the same order on all ranks.

    Raises:
        ValueError: the model has no tables.
    """
    dynamic: list[DynamicVariable] = []
    static: list[Variable] = []
    # The view does not look into lists of Keras's, such as a layer's list of tables.
    weights = model.variables if isinstance(model, keras.layers.Layer) else []
    for found in [*tf.train.TrackableView(model).descendants(), *weights]:
        for each in (found, getattr(found, "_value", None)):
            if isinstance(each, DynamicVariable) and not any(each is other for other in dynamic):
                dynamic.append(each)
            elif isinstance(each, Variable) and not any(each is other for other in static):
                static.append(each)
    if dynamic:
        return dynamic, static
    raise ValueError(
        f"{model!r:.120} has no dynamic tables. If they are attributes of a layer that has not "
        "been called yet, call it once."
    )


def _named(tables: list[DynamicVariable], part_of: Any) -> dict[str, DynamicVariable]:
    """Returns the tables of a model by their names in dumps of it, or of what it is a part of."""
    named: dict[str, Any] = {}
    if part_of is not None:
        whole = {id(table): name for name, table in named_variables(part_of).items()}
        named = {whole[id(table)]: table for table in tables if id(table) in whole}
    for table in tables:
        served.add_named(named, table)
    return named


def _formats(rows: Any, tables: str, named: Mapping[str, Any]) -> dict[str | None, str]:
    """Returns the formats of vectors by the names of tables; raises ValueError if one is wrong."""
    if rows is None:
        return {}
    if tables != "copy":
        raise ValueError(
            f"rows={rows!r} needs tables='copy'; or publish a copy with these rows, and pass it as "
            "dump."
        )
    formats = formats_by_table(rows)
    for name in formats.keys() - named.keys() - {None}:
        there = ", ".join(map(repr, named))
        raise ValueError(f"rows names table {name!r}, but the model has {there}.")
    return formats


def _weights(
    model: keras.Model | tf.Module,
    dense: str | None,
    part_of: Any,
    dump: pathlib.Path | str | None,
    follow: pathlib.Path | None,
) -> Weights:
    """Returns the dense weights that the loaded model reads from snapshots; none if it cannot.

    Raises:
        ValueError: the snapshots have other weights, or `part_of` does not have those of the model.
    """
    none = Weights({}, {})
    if not isinstance(model, keras.layers.Layer):
        if part_of is not None:
            raise ValueError(f"part_of is for a Keras model, got it for {type(model).__name__}.")
        return none
    if dense is None:
        return none
    try:
        weights = Weights.of(model, part_of)
    except VariableReadError as error:
        _warn_of_constant_weights(str(error))
        return none
    if not weights.read:
        return none
    if follow is not None and exists(follow) and list_snapshots(follow):
        weights.are_at(follow)
    if dump is None:
        return weights
    try:
        are_there = weights.are_at(dump)
    except ValueError as error:
        _warn_of_constant_weights(str(error))
        return none
    if not are_there and follow is not None:
        _warn_of_constant_weights(f"{dump} has no dense weights, only tables")
    return weights if are_there else none


def _warn_of_constant_weights(why: str) -> None:
    warn(
        f"the exported model keeps the dense weights of this export, and does not follow later "
        f"ones: {why.removesuffix('.')}. To silence this warning, pass dense=None."
    )


def _check_free(path: pathlib.Path) -> None:
    if not exists(path) or exists(path / "saved_model.pb"):
        return
    if not is_directory(path) or any(path.iterdir()):
        raise FileExistsError(f"{path} exists, and is not a SavedModel.")


def _endpoints(table: DynamicVariable) -> dict[str, tf.types.experimental.PolymorphicFunction]:
    """Returns the functions that a SavedModel has for its tables, by the names of signatures."""

    def state() -> dict[str, tf.Tensor]:
        found = _ops.library().dynemb_served_state(table.handle)
        return {name: getattr(found, name) for name in found._fields}

    def apply_delta(path: tf.Tensor) -> dict[str, tf.Tensor]:
        applied = _ops.library().dynemb_apply_snapshots(table.handle, path)
        with tf.control_dependencies([applied]):
            now = state()
        return {"applied": applied, "id": now["id"], "watermark": now["watermark"]}

    spec = tf.TensorSpec([], tf.string, name="path")
    return {
        "apply_delta": tf.function(apply_delta, input_signature=[spec], autograph=False),
        "watermark": tf.function(state, input_signature=[], autograph=False),
    }


def _save_keras(
    model: keras.layers.Layer,
    path: pathlib.Path,
    input_signature: Any,
    table: DynamicVariable,
    weights: Mapping[str, Weight],
    rows: served.Rows,
) -> None:
    write = functools.partial(
        model_inputs.write, model, str(path), input_signature, _endpoints(table)
    )
    if weights:
        try:
            with served.exporting(rows):
                write(reading=lambda: reading(model, weights, table))
            return
        except VariableReadError as error:
            _warn_of_constant_weights(str(error))
    members = {name: rows.members[name] for name in rows.members if name != "dense"}
    with served.exporting(rows._replace(members=members)):
        write()


def _save_module(
    model: tf.Module,
    path: pathlib.Path,
    signatures: Any,
    table: DynamicVariable,
    rows: served.Rows,
) -> None:
    if signatures is None:
        signatures = {}
    elif not isinstance(signatures, Mapping):
        signatures = {"serving_default": signatures}
    endpoints = _endpoints(table)
    for name in endpoints:
        if name in signatures:
            raise ValueError(f"signatures must not have the name {name!r}.")
    with served.exporting(rows):
        tf.saved_model.save(model, str(path), signatures={**signatures, **endpoints})


@contextlib.contextmanager
def _logged_as(unfinished: pathlib.Path, path: pathlib.Path) -> Iterator[None]:
    """TensorFlow's log names the path of the export, not the path that it is moved from."""

    def rename(record: logging.LogRecord) -> bool:
        record.msg = record.getMessage().replace(str(unfinished), str(path))
        record.args = ()
        return True

    logger = logging.getLogger("tensorflow")
    logger.addFilter(rename)
    try:
        yield
    finally:
        logger.removeFilter(rename)


def _save(
    model: keras.Model | tf.Module,
    path: pathlib.Path,
    rows: served.Rows,
    signatures: Any,
    input_signature: Any,
    table: DynamicVariable,
    weights: Mapping[str, Weight],
) -> None:
    traced_for_ranks = ValueError(
        "the model has a ConcreteFunction that was traced for several ranks: use the tf.function, "
        "which is traced again."
    )
    try:
        if not isinstance(model, keras.layers.Layer):
            _save_module(model, path, signatures, table, rows)
        else:
            _save_keras(model, path, input_signature, table, weights, rows)
    except AssertionError as error:
        # TensorFlow does not save a function that uses the group of the ranks.
        if "GroupResource" in str(error):
            raise traced_for_ranks from error
        raise
    (saved,) = loader_impl.parse_saved_model(str(path)).meta_graphs
    if any(op.name == "DynembRoute" for op in saved.meta_info_def.stripped_op_list.op):
        raise traced_for_ranks


def _last(path: Any) -> storage.Manifest:
    return storage.Chain.open(path).last.manifest


def _move(unfinished: pathlib.Path, path: pathlib.Path) -> None:
    """Puts a SavedModel in its place."""
    writing.sync(unfinished)
    if exists(path, follow=False):
        writing.exchange(unfinished, path)
        if unfinished.is_symlink():  # the caller removes folders
            unfinished.unlink()
    else:
        os.rename(unfinished, path)
