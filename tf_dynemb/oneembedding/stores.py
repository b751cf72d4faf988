"""OneEmbedding's options of a store: where the rows of an embedding are, and how many."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tf_dynemb._presence import local_path

Path: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"

_BLOCK_SIZES = (512, 4096)


def make_device_mem_store_options(
    persistent_path: Path,
    capacity: int,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
) -> dict[str, Any]:
    """Returns the options of an embedding whose rows are in GPU memory.

    Without a GPU they are in host memory, and the layer warns of this.

    Args:
        persistent_path: the folder of the embedding's snapshots, shared by all ranks; or a list
            with a folder for each rank.
        capacity: the number of rows of all tables and ranks together. `MultiTableEmbedding` says
            what happens when they are full.
        size_factor: the floats per row, as a multiple of the width of its vector: 1 for SGD, 2 with
            momentum or for Adagrad, 3 for Adam. It is checked but not needed: a table gets space
            for its optimizer's state when the optimizer attaches to it.
        storage_dim: the floats per row, if it is not -1. It is checked but not needed.
        physical_block_size: 512 or 4096, the bytes that a disk writes at a time. It is checked but
            not needed: snapshots are written from beginning to end.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    caches = [_full("device", _capacity(capacity))]
    return _options(
        caches, persistent_path, capacity, size_factor, storage_dim, physical_block_size
    )


def make_cached_host_mem_store_options(
    cache_budget_mb: float,
    persistent_path: Path,
    capacity: int,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
) -> dict[str, Any]:
    """Returns the options of an embedding in host memory, whose hot rows are in GPU memory.

    Without a GPU, all rows are in host memory.

    Args:
        cache_budget_mb: the MB (2^20 bytes) of GPU memory of each rank for vectors and optimizer
            state. The tables of the embedding have equal shares of it.
        persistent_path: as in `make_device_mem_store_options`, like all further arguments.
        capacity: the number of rows of all tables and ranks together.
        size_factor: the floats per row, as a multiple of the width of its vector.
        storage_dim: the floats per row, if it is not -1.
        physical_block_size: 512 or 4096.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    caches = [
        _lru("device", _budget("cache_budget_mb", cache_budget_mb, may_be_0=False)),
        _full("host", _capacity(capacity)),
    ]
    return _options(
        caches, persistent_path, capacity, size_factor, storage_dim, physical_block_size
    )


def make_cached_ssd_store_options(
    cache_budget_mb: float,
    persistent_path: Path,
    capacity: int | None = None,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
    host_cache_budget_mb: float = 0,
) -> dict[str, Any]:
    """Returns the options of an embedding in files, whose hot rows are in GPU and host memory.

    The files are for the running process: snapshots keep rows for the next one.

    Args:
        cache_budget_mb: the MB (2^20 bytes) of GPU memory of each rank for hot rows. Without a GPU,
            the same of host memory, if `host_cache_budget_mb` is 0.
        persistent_path: the folder of snapshots, shared by all ranks, in which rank r of n has its
            files in the folder "r-n"; or a list with a folder for each rank.
        capacity: the expected number of rows of all tables and ranks together. It limits nothing:
            the files hold as many rows as fit on the disk.
        size_factor: as in `make_device_mem_store_options`, like the next two.
        storage_dim: the floats per row, if it is not -1.
        physical_block_size: 512 or 4096.
        host_cache_budget_mb: the MB of host memory of each rank for hot rows. The tables of the
            embedding have equal shares of both.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    device = _budget("cache_budget_mb", cache_budget_mb)
    host = _budget("host_cache_budget_mb", host_cache_budget_mb)
    if not device and not host:
        raise ValueError("cache_budget_mb and host_cache_budget_mb are 0: one must be positive.")
    if capacity is not None:
        _capacity(capacity)
    caches = [_lru(kind, mb) for kind, mb in (("device", device), ("host", host)) if mb]
    return _options(
        caches, persistent_path, capacity or 0, size_factor, storage_dim, physical_block_size
    )


@dataclasses.dataclass(frozen=True)
class Store:
    """The options of a store, checked.

    Attributes:
        kind: "device_mem", "cached_host_mem" or "cached_ssd".
        paths: the folder that all ranks share, or one folder for each rank.
        is_shared: which of both.
        capacity: the most rows of all tables and ranks together; None: no limit.
        device_mb: the MB of GPU memory for hot rows of a rank, in a cached store; 0: none.
        host_mb: the MB of host memory for hot rows of a rank, in "cached_ssd"; 0: none.
    """

    kind: str
    paths: tuple[str, ...]
    is_shared: bool
    capacity: int | None
    device_mb: float = 0
    host_mb: float = 0

    @classmethod
    def of(cls, options: Any, ranks: int) -> Store:
        """Checks options, made by the functions above or by hand in the same form.

        Args:
            options: the options.
            ranks: the number of ranks.

        Raises:
            TypeError: the options have another form.
            ValueError: a value is out of range, or the number of paths is not the number of ranks.
        """
        try:
            caches = options["kv_store"]["caches"]
            table = options["kv_store"]["persistent_table"]
            path = table["path"]
            caches = [caches] if isinstance(caches, Mapping) else list(caches)
            kinds = [(cache["policy"], cache["value_memory_kind"]) for cache in caches]
            sizes = [
                cache["capacity" if policy == "full" else "cache_memory_budget_mb"]
                for cache, (policy, _) in zip(caches, kinds, strict=True)
            ]
        except (KeyError, TypeError, AttributeError):
            raise TypeError(
                "store_options must be the result of a make_..._store_options function, got "
                f"{options!r:.200}."
            ) from None
        _check_sizes(options.get("size_factor", 1), options.get("storage_dim", -1))
        _check_block_size(table.get("physical_block_size", 4096))
        paths = _check_path(path)
        is_shared = not isinstance(path, (list, tuple))
        if not is_shared and len(paths) != ranks:
            raise ValueError(
                f"persistent_path must be one path, or a list with a path for each of the {ranks} "
                f"rank(s), got {list(paths)!r}."
            )
        if kinds == [("full", "device")]:
            return cls("device_mem", paths, is_shared, _capacity(sizes[0]))
        if kinds == [("lru", "device"), ("full", "host")]:
            budget = _budget("cache_budget_mb", sizes[0], may_be_0=False)
            return cls("cached_host_mem", paths, is_shared, _capacity(sizes[1]), budget)
        if kinds and kinds in ([("lru", "device")], [("lru", "host")], _BOTH):
            budgets = {
                kind: _budget("cache_memory_budget_mb", size, may_be_0=False)
                for (_, kind), size in zip(kinds, sizes, strict=True)
            }
            device, host = budgets.get("device", 0), budgets.get("host", 0)
            return cls("cached_ssd", paths, is_shared, None, device, host)
        raise ValueError(f"store_options has a combination of caches without a store: {caches!r}.")

    @property
    def snapshots(self) -> str:
        """The folder of the snapshots of all ranks."""
        return os.path.join(self.paths[0], "snapshots")

    def folder_of_rank(self, rank: int, ranks: int) -> str:
        """Returns the folder of a rank's files."""
        return (
            os.path.join(self.paths[0], f"{rank}-{ranks}") if self.is_shared else self.paths[rank]
        )


_BOTH = [("lru", "device"), ("lru", "host")]


def _options(
    caches: list[dict[str, Any]],
    persistent_path: Path,
    capacity: int,
    size_factor: int,
    storage_dim: int,
    physical_block_size: int,
) -> dict[str, Any]:
    """Returns options in OneFlow's form, which JSON can express."""
    paths = _check_path(persistent_path)
    is_list = isinstance(persistent_path, (list, tuple))
    _check_sizes(size_factor, storage_dim)
    return {
        "kv_store": {
            "caches": caches,
            "persistent_table": {
                "path": list(paths) if is_list else paths[0],
                "physical_block_size": _check_block_size(physical_block_size),
                "capacity_hint": int(capacity),
            },
        },
        "size_factor": int(size_factor),
        "storage_dim": int(storage_dim),
    }


def _full(kind: str, capacity: int) -> dict[str, Any]:
    return {"policy": "full", "capacity": capacity, "value_memory_kind": kind}


def _lru(kind: str, budget_mb: float) -> dict[str, Any]:
    return {"policy": "lru", "cache_memory_budget_mb": budget_mb, "value_memory_kind": kind}


def _capacity(value: Any) -> int:
    return _integer("capacity", value, "a positive integer", lambda number: number > 0)


def _budget(name: str, value: Any, may_be_0: bool = True) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number of MB, got {value!r}.")
    number = float(value)
    if not math.isfinite(number) or number < 0 or (number == 0 and not may_be_0):
        least = "0 or more" if may_be_0 else "more than 0"
        raise ValueError(f"{name} must be {least} MB, got {value!r}.")
    return number


def _check_sizes(size_factor: Any, storage_dim: Any) -> None:
    _integer("size_factor", size_factor, "a positive integer", lambda number: number > 0)
    _integer(
        "storage_dim",
        storage_dim,
        "-1 or a positive integer",
        lambda number: number > 0 or number == -1,
    )


def _check_block_size(value: Any) -> int:
    return _integer(
        "physical_block_size", value, "512 or 4096", lambda number: number in _BLOCK_SIZES
    )


def _integer(name: str, value: Any, what: str, is_valid: Callable[[int], bool]) -> int:
    is_integral = isinstance(value, float) and value.is_integer()  # 4e7 is a usual capacity
    if isinstance(value, bool) or not (hasattr(value, "__index__") or is_integral):
        raise TypeError(f"{name} must be {what}, got {value!r}.")
    if not is_valid(int(value)):
        raise ValueError(f"{name} must be {what}, got {value!r}.")
    return int(value)


def _check_path(value: Any) -> tuple[str, ...]:
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    paths = []
    for item in items:
        if not isinstance(item, (str, os.PathLike)):
            raise TypeError(
                "persistent_path must be a path, or a list with a path for each rank, got "
                f"{value!r}."
            )
        path = os.fspath(item)
        if not isinstance(path, str) or not path:
            raise ValueError(f"persistent_path must not be empty, got {value!r}.")
        paths.append(str(local_path(item, "persistent_path")))
    if not paths:
        raise ValueError("persistent_path is an empty list: it needs a path for each rank.")
    return tuple(paths)
