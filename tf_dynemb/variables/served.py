"""Tables in SavedModels: the resource that represents a table, and what one save exports.

`tf.saved_model.save` walks over the objects of a model. A `DynamicVariable` has a `ServedTable` as
its child in this walk: a resource that takes the place of the table's handle in the exported graph,
and opens the exported rows when the model is loaded. The rows themselves are written by a saver
(`saved_models/saver.py`), when TensorFlow writes the variables.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import tensorflow as tf
from google.protobuf import wrappers_pb2
from tensorflow.python.saved_model import registration
from tensorflow.python.trackable import base, resource

from tf_dynemb import _ops, communicator
from tf_dynemb._version import __version__

if TYPE_CHECKING:
    # A process that only loads models needs neither this nor Keras.
    from tf_dynemb.tables.table import Table

# The folder of a SavedModel for files that are not TensorFlow's, and our part of it.
EXTRA = "assets.extra"
FOLDER = "tf_dynemb"
DESCRIPTOR = "tf_dynemb.json"

# The key of the `Export` in TensorFlow's cache of one save.
_KEY = type("_Key", (), {})()


class Rows(NamedTuple):
    """Where the rows of exported tables come from.

    Attributes:
        how: "copy", "link", "external" or "move".
        path: the path or URL of the snapshots; None: the tables as they are now.
        members: members of the descriptor.
        tables: the tables whose names in the snapshots are known, by these names.
        formats: the formats of vectors by the names of tables; under None, of all others.
    """

    how: str = "copy"
    path: pathlib.Path | str | None = None
    members: Mapping[str, Any] = {}
    tables: Mapping[str, Table] = {}
    formats: Mapping[str | None, str] = {}


# The rows of the `export_saved_model` that runs; None: `Rows()`.
_ROWS: contextvars.ContextVar[Rows | None] = contextvars.ContextVar("_ROWS", default=None)


@contextlib.contextmanager
def exporting(rows: Rows) -> Iterator[None]:
    """A context in which the tables that TensorFlow saves have these rows."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


class Residence(NamedTuple):
    """Where the rows of loaded tables are.

    Attributes:
        device: the device of the tables and of the operators that look up their keys.
        max_hbm_bytes: the bytes of the vectors of a table that may be in the memory of a GPU.
    """

    device: str = _ops.CPU
    max_hbm_bytes: int = 0


# Of the tables of models that are loaded in this context.
_RESIDENCE: contextvars.ContextVar[Residence | None] = contextvars.ContextVar(
    "_RESIDENCE", default=None
)


@contextlib.contextmanager
def loading(residence: Residence) -> Iterator[None]:
    """A context in which the tables of models that TensorFlow loads get this residence."""
    token = _RESIDENCE.set(residence)
    try:
        yield
    finally:
        _RESIDENCE.reset(token)


class Source:
    """Snapshots that an exported model has: of its tables, or of a model that was loaded.

    Attributes:
        rows: where the rows come from.
        tables: the tables by their names in the snapshots.
        directory: where the snapshots are in the SavedModel, unless they are "external".
        asset: the descriptor (cc/serving/descriptor.h).
    """

    def __init__(self, folder: str, number: int, rows: Rows) -> None:
        self.rows = rows
        self.tables: dict[str, Table] = dict(rows.tables)
        suffix = f"_{number}" if number else ""
        self.directory = pathlib.PurePath(EXTRA, FOLDER + suffix)
        is_elsewhere = rows.how == "external"
        described = {
            "format": "tf_dynemb.served_tables",
            "version": 1,
            "tables": str(rows.path) if is_elsewhere else f"../{self.directory}",
            # For people: TensorFlow's error names an operator only.
            "writer": f"tf_dynemb {__version__}",
            "load": "import tf_dynemb before tf.saved_model.load",
            **rows.members,
        }
        file = pathlib.Path(folder, DESCRIPTOR.replace(".", f"{suffix}."))
        file.write_text(json.dumps(described) + "\n")
        self.asset = tf.saved_model.Asset(str(file))

    def add(self, table: Table) -> str:
        """Adds a table; returns its name, which no other table of the source has."""
        return add_named(self.tables, table)


def add_named(tables: dict[str, Table], table: Table) -> str:
    """Adds a table under a name that no other one has, unless it is there; returns its name."""
    for name, known in tables.items():
        if known is table:
            return name
    plain = name = str(table.name).removesuffix(":0")
    number = 0
    while name in tables:
        number += 1
        name = f"{plain}_{number}"
    tables[name] = table
    return name


class Export:
    """The content that one call of `tf.saved_model.save` exports.

    Attributes:
        sources: the snapshots, by the path of a loaded model, or None.
    """

    def __init__(self) -> None:
        self.sources: dict[pathlib.Path | str | None, Source] = {}
        self._rows = _ROWS.get() or Rows()
        # TensorFlow copies the descriptors from here.
        self._folder = tempfile.mkdtemp(prefix="tf_dynemb_")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @staticmethod
    def of(cache: dict[object, Any] | None) -> Export:
        """Returns the export of the save that this cache belongs to."""
        if cache is None:
            return Export()
        if _KEY not in cache:
            cache[_KEY] = Export()
        export: Export = cache[_KEY]
        return export

    def source(self, loaded: Rows | None) -> Source:
        """Returns the source for the rows of a loaded model, or for tables of this process.

        Raises:
            RuntimeError: the tables have rows on other ranks, which do not take part.
        """
        if loaded is None and self._rows.path is None and communicator.get().size > 1:
            raise RuntimeError(
                "this function saves a model on one rank, and its tables have rows on others: call "
                "tf_dynemb.export_saved_model on all ranks."
            )
        rows = self._rows if loaded is None else loaded
        path = None if loaded is None else loaded.path
        if path not in self.sources:
            self.sources[path] = Source(self._folder, len(self.sources), rows)
        return self.sources[path]


@registration.register_serializable(package="tf_dynemb")
class ServedTable(resource.TrackableResource):  # type: ignore[misc]
    """A read-only table of an exported model.

    In the process that exports, it represents a `DynamicVariable`, and has its handle. In a process
    that has loaded the model, its handle refers to the table on disk.

    Attributes:
        export: what the running save exports; None before the first.
    """

    def __init__(
        self, attributes: Mapping[str, Any], name: str, residence: Residence | None = None
    ) -> None:
        self._residence = residence or Residence()
        super().__init__(device=self._residence.device)
        self._attributes = dict(attributes)
        self._table: weakref.ref[Table] | None = None
        self._name = name
        self.export: Export | None = None
        self._source: Source | None = None
        self._descriptor: Any = None  # the tf.saved_model.Asset of a loaded model

    @staticmethod
    def of(table: Table) -> ServedTable:
        """Returns the only object that represents a table."""
        known = getattr(table, "_served", None)
        served: ServedTable | None = None if known is None else known()
        if served is None:
            served = ServedTable({}, "")
            served._table = weakref.ref(table)
            served._resource_handle_value = table.handle
            table._served = weakref.ref(served)  # type: ignore[attr-defined]
        return served

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the table."""
        return self.resource_handle

    @property
    def loaded_from(self) -> pathlib.Path | str | None:
        """The path of the snapshots of a loaded model; None for a table of this process."""
        return None if self._descriptor is None else self._loaded_rows().path

    @property
    def follows(self) -> str | None:
        """The path that a loaded model polls; None: none."""
        return None if self._descriptor is None else self._members()[1].get("follow")

    def _members(self) -> tuple[pathlib.Path, dict[str, Any]]:
        """The descriptor of a loaded model, and its members."""
        file = pathlib.Path(self._descriptor.asset_path.numpy().decode())
        return file, json.loads(file.read_text())

    def _loaded_rows(self) -> Rows:
        """The rows of a loaded model, for a copy of it."""
        file, members = self._members()
        path = pathlib.Path(os.path.normpath(file.parent / members["tables"]))
        # The graph of the model reads the weights or does not.
        return Rows("copy", path, {"dense": True} if members.get("dense") else {})

    def _create_resource(self, resource_name: str = "") -> tf.Tensor:
        attributes = _as_attributes(self._attributes)
        # The graph of a model does not say where its tables are.
        if self._residence.device != _ops.CPU and tf.executing_eagerly():
            attributes["max_hbm_bytes"] = self._residence.max_hbm_bytes
        return _ops.library().dynemb_served_table(
            table=self._name, resource_name=resource_name, **attributes
        )

    def _initialize(self) -> tf.Operation | None:
        source = self._descriptor if self._source is None else self._source.asset
        return _ops.library().dynemb_open_served_table(self.resource_handle, source.asset_path)

    def _trackable_children(
        self, save_type: str = "checkpoint", cache: dict[object, Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        if save_type != "savedmodel":
            return dict(super()._trackable_children(save_type, **kwargs))
        self.export = Export.of(cache)
        table = None if self._table is None else self._table()
        if table is None:
            self._source = self.export.source(self._loaded_rows())
        else:
            self._source = self.export.source(None)
            self._name = self._source.add(table)
            self._attributes = _attributes_of(table)
        children = super()._trackable_children(save_type, cache=cache, **kwargs)
        return {**children, "descriptor": self._source.asset}

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, **_: Any
    ) -> list[tf.Tensor]:
        # In a graph the table has a name, by which each run of a session finds it. It differs for
        # each export, because a process can load several versions of a model.
        exported = ServedTable(self._attributes, self._name)
        with tf.device("CPU"):
            exported._resource_handle = exported._create_resource(
                f"dynemb_served/{os.urandom(8).hex()}/{self._name}"
            )
        object_map[self] = exported
        tensor_map[self.resource_handle] = exported.resource_handle
        return [self.resource_handle]

    def _serialize_to_proto(self, object_proto: Any = None, **_: Any) -> Any:
        if object_proto is not None:
            object_proto.resource.device = "CPU"
        saved = json.dumps({"name": self._name, "attributes": self._attributes})
        return wrappers_pb2.StringValue(value=saved)

    @classmethod
    def _deserialize_from_proto(cls, proto: Any = None, **_: Any) -> ServedTable:
        text = wrappers_pb2.StringValue()
        proto.Unpack(text)
        saved = json.loads(text.value)
        return cls(saved["attributes"], saved["name"], _RESIDENCE.get())

    def _add_trackable_child(self, name: str, value: Any) -> None:
        # The restored functions do what the methods of this class do.
        if name == "descriptor":
            self._descriptor = value


class InSavedModel(base.Trackable):  # type: ignore[misc]
    """The calls that `tf.saved_model.save` makes on a `DynamicVariable`.

    The variable becomes an object without a type, whose child `served` takes its place.
    """

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children = dict(super()._trackable_children(save_type, **kwargs))
        if save_type == "savedmodel":
            children["served"] = ServedTable.of(cast("Table", self))
        return children

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> list[tf.Tensor]:
        return []  # the ServedTable maps the handle

    def _write_object_proto(self, proto: Any, options: Any) -> None:
        proto.user_object.identifier = "_generic_user_object"
        proto.user_object.version.producer = 1
        proto.user_object.version.min_consumer = 1


def _attributes_of(table: Table) -> dict[str, Any]:
    """Returns the attributes of the operator DynembServedTable, as JSON can express them."""
    has = table.attributes
    admission = table.options.admission
    return {
        "key_dtype": table.key_type.name,
        "dtype": table.dtype.name,
        "dim": table.dimension,
        "seed": has["seed"],
        "initializers": list(has["initializers"]),
        "initializer_args": list(has["initializer_args"]),
        "default_vector": list(table.default_vector or ()),
        "absent": "initial" if admission is None else admission.unadmitted,
    }


def _as_attributes(saved: Mapping[str, Any]) -> dict[str, Any]:
    dtypes = {name: tf.as_dtype(saved[name]) for name in ("key_dtype", "dtype")}
    return {**saved, **dtypes}
