"""Reads Criteo's click logs, in three common layouts, with numpy; each rank reads its own part.

A sample has a label, 13 dense features, and the ids of 26 categorical features: `hotness[i]` ids
of feature i. The layouts are little-endian and have no headers:

reference   `train_data.bin` and `test_data.bin` of github.com/facebookresearch/dlrm
            (`data_loader_terabyte.py`). Each sample is an int32 label, 13 int32 and 26 int32. The
            model gets log(x + 1) of the dense features.
mlperf      `train_data.bin` and `val_data.bin` of MLPerf's DLRM-DCNv2, as HugeCTR's
            `convert_to_raw.py` writes them. Each sample is an int32 label, 13 float32 that are
            already logarithms, and sum(hotness) = 214 int32.
columns     folders `train` and `test` with `label.bin`, `dense.bin`, `category.bin` and
            `metadata.json`, as SOK's `split_bin.py` creates them from either of the above. The
            metadata has the types and the hotness. With `dense_log` the model gets log(x + 3).
"""

from __future__ import annotations

import concurrent.futures
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb.communicator import Communicator

DENSE = 13
LAYOUTS = ("reference", "mlperf", "columns")

# MLPerf's sizes: the ids per sample and the distinct ids of each feature.
# fmt: off
HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956,
    405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152,
    12_973, 108, 36,
)
# fmt: on


class Samples(NamedTuple):
    """Samples: dense float32 [n, 13], ids int32 [n, sum(hotness)], labels float32 [n]."""

    dense: Any
    ids: Any
    labels: Any


class Clicks(Protocol):
    """Samples, addressed by number, and the hotness of the features."""

    hotness: tuple[int, ...]

    def __len__(self) -> int: ...

    def read(self, begin: int, end: int) -> Samples:
        """Returns the samples from `begin` up to `end`, as numpy arrays."""


class Interleaved:
    """A file with one sample after the other.

    Args:
        path: the file.
        hotness: ids per sample of each feature.
        dense_type: "i4" (the model gets log(x + 1)) or "f4" (the model gets the values).
    """

    def __init__(self, path: Path, hotness: tuple[int, ...], dense_type: str) -> None:
        self.hotness = hotness
        self._counts = dense_type == "i4"
        sample = np.dtype(
            [("label", "<i4"), ("dense", f"<{dense_type}", DENSE), ("ids", "<i4", sum(hotness))]
        )
        self._samples = _map(path, sample)

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, begin: int, end: int) -> Samples:
        """Returns the samples from `begin` up to `end`."""
        part = self._samples[begin:end]
        dense = np.asarray(part["dense"], np.float32)
        if self._counts:
            dense = np.log1p(dense.clip(min=0))
        return Samples(dense, np.asarray(part["ids"], order="C"), part["label"].astype(np.float32))


class Columns:
    """A folder with a file for the labels, one for the dense features, and one for the ids."""

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / "metadata.json").read_text())
        self.hotness = tuple(about["hotness_per_table"])
        self._log = bool(about["dense_log"])
        columns = []
        for name, width in (("label", 1), ("dense", DENSE), ("category", sum(self.hotness))):
            number = np.dtype(about[f"{name}_raw_type"]).newbyteorder("<")
            columns.append(_map(folder / f"{name}.bin", np.dtype([("row", number, (width,))])))
        self._labels, self._dense, self._ids = (column["row"] for column in columns)
        if not len(self._labels) == len(self._dense) == len(self._ids):
            raise ValueError(
                f"{folder} has {len(self._labels)} labels for {len(self._dense)} samples' dense "
                f"features and {len(self._ids)} samples' ids"
            )

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, begin: int, end: int) -> Samples:
        """Returns the samples from `begin` up to `end`."""
        dense = np.asarray(self._dense[begin:end], np.float32)
        ids = np.asarray(self._ids[begin:end], np.int32, order="C")
        labels = np.asarray(self._labels[begin:end].reshape(-1), np.float32)
        return Samples(np.log(dense + 3) if self._log else dense, ids, labels)


def _map(path: Path, sample: np.dtype) -> npt.NDArray:
    """Maps a file as an array of samples; nothing is read before it is needed."""
    size = path.stat().st_size
    if not size or size % sample.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, no multiple of the {sample.itemsize} of a sample"
        )
    return np.memmap(path, sample, "r")


def open_clicks(folder: Path, layout: str, hotness: tuple[int, ...]) -> tuple[Clicks, Clicks]:
    """Opens the training and the test samples in a folder.

    Args:
        folder: the folder with the files.
        layout: one of LAYOUTS.
        hotness: ids per sample of each feature, for the layout "mlperf".
    """
    if layout == "columns":
        return Columns(folder / "train"), Columns(folder / "test")
    files = [folder / name for name in ("test_data.bin", "val_data.bin")]
    test = next((file for file in files if file.exists()), files[0])
    if layout == "reference":
        hotness, dense_type = (1,) * len(HOTNESS), "i4"
    else:
        dense_type = "f4"
    return tuple(Interleaved(f, hotness, dense_type) for f in (folder / "train_data.bin", test))


class Batches:
    """This rank's part of every batch, read ahead by a thread.

    A part is a range of consecutive samples. The parts of a batch differ in size by at most one
    sample. A part is empty if the batch has fewer samples than there are ranks.

    Args:
        clicks: the samples of all ranks.
        size: samples per batch, over all ranks.
        comm: the ranks.
        whole: whether to drop the last samples if they do not fill a batch.
        most: the maximum number of batches.
    """

    AHEAD = 2

    def __init__(
        self, clicks: Clicks, size: int, comm: Communicator, whole: bool, most: int | None = None
    ) -> None:
        samples = len(clicks) // size * size if whole else len(clicks)
        if most is not None:
            samples = min(samples, most * size)
        self.samples = samples
        self._clicks = clicks
        self._parts = []
        for begin in range(0, samples, size):
            count = min(size, samples - begin)
            ends = [begin + count * rank // comm.size for rank in (comm.rank, comm.rank + 1)]
            self._parts.append((ends[0], ends[1]))

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Samples]:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            coming: deque[concurrent.futures.Future[Samples]] = deque()
            for part in self._parts:
                coming.append(thread.submit(self._read, *part))
                if len(coming) > self.AHEAD:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()

    def _read(self, begin: int, end: int) -> Samples:
        return Samples(*map(tf.constant, self._clicks.read(begin, end)))
