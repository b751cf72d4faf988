"""Measures the speed of `model.fit`."""

from __future__ import annotations

import time

import keras
import numpy as np


class TrainingClock(keras.callbacks.Callback):
    """Measures training rows per second, excluding validation and the first epoch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self._began = 0.0
        self._seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Stops the clock: validation follows."""
        self._seconds.append(time.perf_counter() - self._began)

    def rows_per_second(self) -> float:
        """Returns the rate of the median epoch, without the first unless it is the only one."""
        return self._rows / float(np.median(self._seconds[1:] or self._seconds))
