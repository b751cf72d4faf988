"""The device that a table is created on, and the memory that holds its rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import kernels

from tf_dynemb import _gpu, _ops
from tf_dynemb._warn import warn

CPU = _ops.CPU

_NO_DEVICE_CODE = (
    "this build of tf_dynemb has no CUDA code (in a checkout, TF_DYNEMB_CUDA=1 make build compiles "
    "it; docs/gpu.md)"
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The place of a table.

    Attributes:
        device: TensorFlow's name of the device that the table's operators run on.
        tier: "host", "hbm" or "hybrid"; see `TableOptions.var_type`.
    """

    device: str
    tier: str


class Placed(Protocol):
    """The members of a DynamicVariable that this module needs."""

    @property
    def handle(self) -> tf.Tensor:
        """The resource."""

    @property
    def placement(self) -> Placement:
        """The place of the table."""


def place(var_type: str) -> Placement:
    """Returns the place of a table of this `var_type`, created under the current `tf.device`.

    Raises:
        ValueError: `var_type` is "hbm", and there is no GPU, or this build is for the CPU only.
    """
    wanted = context.context().device_name
    kind = tf.DeviceSpec.from_string(wanted).device_type if wanted else None
    if var_type in ("host", "file") or (var_type == "hybrid" and kind == "CPU"):
        return Placement(CPU, "host")
    gpus = tf.config.list_logical_devices("GPU") if has_gpu_kernels() else []
    if gpus:
        return Placement(_short(wanted if kind == "GPU" else gpus[0].name), var_type)
    if var_type == "hybrid":
        if not has_gpu_kernels() and tf.config.list_physical_devices("GPU"):
            _say_that_no_gpu_is_used()
        return Placement(CPU, "host")
    reason = "TensorFlow sees none" if has_gpu_kernels() else _NO_DEVICE_CODE
    raise ValueError(
        f"var_type='hbm' keeps rows in GPU memory and needs a GPU, but {reason}; use 'hybrid' or "
        "'host'."
    )


def existing_device(name: str) -> str:
    """Returns TensorFlow's name of a device that operators on tables can run on.

    Args:
        name: "CPU", or a GPU, such as "GPU:0" or "/device:GPU:1".

    Raises:
        ValueError: there is no such device, or the operators have no kernels for it.
    """
    try:
        wanted = tf.DeviceSpec.from_string(name)
    except (AttributeError, ValueError):
        wanted = tf.DeviceSpec()
    if wanted.device_type not in ("CPU", "GPU"):
        raise ValueError(f"device must be 'CPU', or a GPU such as 'GPU:0', got {name!r}.")
    if wanted.device_type == "GPU" and not has_gpu_kernels():
        raise ValueError(f"device={name!r} needs code for a GPU, but {_NO_DEVICE_CODE}.")
    devices = [each.name for each in tf.config.list_logical_devices(wanted.device_type)]
    for device in devices:
        there = tf.DeviceSpec.from_string(device)
        parts = ("job", "replica", "task", "device_index")
        if all(getattr(wanted, part) in (None, getattr(there, part)) for part in parts):
            return _short(device)
    raise ValueError(f"there is no device {name!r}: TensorFlow sees {devices}.")


@functools.cache
def _say_that_no_gpu_is_used() -> None:
    warn(
        f"TensorFlow sees a GPU, but {_NO_DEVICE_CODE}; tables are in the host's memory. "
        "To silence this warning, pass var_type='host'."
    )


def _short(name: str) -> str:
    """Returns the canonical name of a device; a device of this process is named without it."""
    device = tf.DeviceSpec.from_string(name)
    if device.job == "localhost":
        device = device.replace(job=None, replica=None, task=None)
    return str(device.to_string())


@functools.cache
def has_gpu_kernels() -> bool:
    """Whether the operator library was built with CUDA."""
    _ops.library()
    registered = kernels.get_registered_kernels_for_op("DynembTable").kernel
    return any(kernel.device_type == "GPU" for kernel in registered)


class GpuInfo(NamedTuple):
    """The operator library of this process, and why it is this one.

    Attributes:
        driver: the newest CUDA version that the NVIDIA driver supports, such as "12.4"; None
            without a driver.
        library: the path of the operator library.
        device_code: whether this library has code for GPUs.
        reason: a sentence that says what decided.
    """

    driver: str | None
    library: str
    device_code: bool
    reason: str


def gpu_info() -> GpuInfo:
    """Returns which operator library this process uses, and why.

    A wheel has two libraries: one for drivers of CUDA 13, and one for drivers of CUDA 12. Call this
    if tables are in host memory although the machine has a GPU, or cannot be created on it. Which
    GPUs TensorFlow sees, `tf.config.list_physical_devices("GPU")` says.
    """
    library, reason = _ops.chosen_library(tf.__version__)
    driver = _gpu.driver_version()
    return GpuInfo(
        None if driver is None else _gpu.version_text(driver),
        str(library),
        has_gpu_kernels(),
        reason if has_gpu_kernels() else f"{reason} The library has no code for GPUs.",
    )


def device_of(table: Placed | tf.Variable) -> str:
    """Returns the device that our operators for a DynamicVariable or a tf.Variable run on."""
    placement = getattr(table, "placement", None)
    if placement is not None:
        return str(placement.device)
    return _short(table.handle.device) if has_gpu_kernels() else CPU


def common_device(tables: Sequence[Placed | tf.Variable]) -> str:
    """Returns the device that all of the tables are on; the CPU if they are on several."""
    if not context.num_gpus():
        return CPU
    devices = {device_of(table) for table in tables}
    return devices.pop() if len(devices) == 1 else CPU


def by_placement(tables: Sequence[Placed]) -> list[list[int]]:
    """Returns, for each place, the numbers of the tables in it: an operator needs one place.

    Tables of one device are in one place, except for tables in the host's memory.
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    for i, table in enumerate(tables):
        place_of = table.placement
        groups.setdefault((place_of.device, place_of.tier == "host"), []).append(i)
    return list(groups.values())
