"""The tables that a crash may leave: the rows of the last publication that had returned, or later.

A publication is a flush, a dump or a delta. They are numbered by workloads.Log, which also keeps
the rows of each.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable

import numpy as np
import table_reader
import tensorflow as tf
import workloads
from chain_reader import Rows
from replay import Crash, Model, Record, crashes, read_trace

import tf_dynemb as de
from tf_dynemb import serving

Contents = dict[str, Rows]
COLUMNS = ("keys", "vectors", "state", "updates")


@dataclasses.dataclass(frozen=True)
class Phase:
    """The expected state at some point.

    Attributes:
        least: the last publication that has returned; 0: none has.
        most: the last one that has begun.
        forgets: for each call of `forget`, the last publication before it, its keys, and whether it
            has returned.
    """

    least: int = 0
    most: int = 0
    forgets: tuple[tuple[int, tuple[int, ...], bool], ...] = ()

    def after(self, event: dict) -> Phase:
        """The phase after a mark."""
        match event["event"]:
            case "begins":
                return dataclasses.replace(self, most=event["number"])
            case "returned":
                return dataclasses.replace(self, least=event["number"])
            case "forgets":
                call = (self.most, tuple(event["keys"]), False)
                return dataclasses.replace(self, forgets=(*self.forgets, call))
            case "forgot":
                call = (*self.forgets[-1][:2], True)
                return dataclasses.replace(self, forgets=(*self.forgets[:-1], call))
        return self

    def gone(self, number: int, surely: bool) -> np.ndarray:
        """The keys that were forgotten since a publication; `surely`: by calls that returned."""
        keys = [
            key
            for before, keys, returned in self.forgets
            if before >= number and (returned or not surely)
            for key in keys
        ]
        return np.unique(np.array(keys, np.int64))


@dataclasses.dataclass(frozen=True)
class Recording:
    """A workload that was recorded."""

    folder: pathlib.Path
    trace: list[Record]
    expected: dict[int, Contents]

    @staticmethod
    def read(folder: pathlib.Path) -> Recording:
        expected: dict[int, Contents] = {}
        for path in folder.glob("expected-*.npz"):
            columns: dict[str, dict[str, np.ndarray]] = {}
            with np.load(path) as loaded:
                for name, value in loaded.items():
                    table, _, column = name.rpartition("/")
                    columns.setdefault(table, {})[column] = value
            number = int(path.stem.rpartition("-")[2])
            expected[number] = {
                table: Rows(**table_columns) for table, table_columns in columns.items()
            }
        return Recording(folder, read_trace(folder / "trace"), expected)


def subset(rows: Rows, mask: np.ndarray) -> Rows:
    return Rows(*(column[mask] for column in rows))


def matches(found: Contents, expected: Contents, phase: Phase, number: int, at_once: bool) -> bool:
    """Whether tables have the rows of a publication, less the rows that were forgotten since.

    Args:
        found: the tables.
        expected: the tables of the publication.
        phase: the calls of `forget`.
        number: the publication.
        at_once: whether a forgotten row must be gone as soon as `forget` has returned, as from a
            table. Otherwise it can be there until the next publication has returned.
    """
    if found.keys() != expected.keys():
        return False
    for name, rows in found.items():
        missing = np.setdiff1d(expected[name].keys, rows.keys)
        if not np.isin(missing, phase.gone(number, surely=False)).all():
            return False
        if at_once and np.isin(phase.gone(number, surely=True), rows.keys).any():
            return False
        expected_rows = subset(expected[name], np.isin(expected[name].keys, rows.keys))
        if not rows.same(expected_rows, COLUMNS):
            return False
    return True


def check(found: Contents, recording: Recording, phase: Phase, at_once: bool = False) -> None:
    """Raises AssertionError unless the rows belong to a publication that is permitted."""
    numbers = range(max(1, phase.least), phase.most + 1)
    if any(matches(found, recording.expected[n], phase, n, at_once) for n in numbers):
        return
    if phase.least == 0 and not any(len(rows.keys) for rows in found.values()):
        return
    was = [n for n in recording.expected if matches(found, recording.expected[n], phase, n, False)]
    sizes = {name: len(rows.keys) for name, rows in found.items()}
    raise AssertionError(
        f"the rows are not from publication {phase.least} to {phase.most}, but "
        f"{f'of {was}' if was else f'others: {sizes}'}"
    )


# --- Opening what is left


@dataclasses.dataclass
class Tables:
    """Opens a persistent table.

    Attributes:
        spec: the table.
        same_process: whether the process has the id of the one before, as in a container, and
            therefore names its running files as that one did.
    """

    spec: workloads.Spec = workloads.NARROW
    same_process: bool = False

    def ignored(self, path: str) -> bool:
        """The running files of a table are a cache."""
        return not self.same_process and path.rpartition("/")[2].startswith("rows-")

    def _open(self, files: pathlib.Path) -> de.DynamicVariable:
        return self.spec.open(files)

    def __call__(
        self, files: pathlib.Path, recording: Recording, phase: Phase, goes_on: bool
    ) -> None:
        if self.same_process:
            self._rename_running_files(files / self.spec.folder)
        table = self._open(files)
        found = table_reader.rows_of(table)
        check({workloads.NAME: found}, recording, phase, at_once=True)
        if not goes_on:
            return
        # The table can be used, and flushed, and leaves nothing else.
        workloads.fill(table, [10**6], 1)
        expected = table_reader.rows_of(table)
        table.flush()
        del table
        gc.collect()
        table = self._open(files)
        assert table_reader.rows_of(table).same(expected, COLUMNS)
        kept = os.listdir(files / self.spec.folder / f"{workloads.NAME}.persistent")
        assert len(kept) == 2, f"files are left: {kept}"

    def _rename_running_files(self, folder: pathlib.Path) -> None:
        before = sorted(folder.glob("rows-*"))
        if not before:
            return
        probe = folder.parent / "probe"
        table = workloads.Spec(folder=probe.name).open(folder.parent)
        (probe_folder,) = probe.glob("rows-*")
        process, number = probe_folder.name.rpartition("-")[::2]
        del table
        gc.collect()
        shutil.rmtree(probe)
        before[-1].rename(folder / f"{process}-{int(number) + 1}")


@dataclasses.dataclass
class Dumps:
    """Loads a chain, and serves it."""

    parent: str = "."

    def __post_init__(self) -> None:
        self._tables = workloads.dumped()  # a load replaces their rows
        self._optimizer = workloads.adagrad(self._tables)

    def ignored(self, path: str) -> bool:
        return False

    def __call__(
        self, files: pathlib.Path, recording: Recording, phase: Phase, goes_on: bool
    ) -> None:
        path = files / self.parent / "chain"
        tables, optimizer = self._tables, self._optimizer
        try:
            de.load(path, tables, optimizer, quiet=True)
        except FileNotFoundError:
            assert phase.least == 0
            return
        found = table_reader.contents(tables)
        check(found, recording, phase)
        reader = serving.Reader(path)
        for (name, rows), table in zip(found.items(), tables, strict=True):
            assert reader.size(name) == len(rows.keys)
            served = reader.lookup(rows.keys, name)
            loaded = tf.cast(table.lookup(rows.keys, insert=False), tf.float32)
            np.testing.assert_array_equal(served, loaded)
        del reader
        if not goes_on:
            return
        # The chain can be continued, and leaves nothing else.
        tables = workloads.dumped()
        optimizer = workloads.adagrad(tables)
        de.load(path, tables, optimizer, quiet=True)
        workloads.fill(tables[0], [10**6], 1)
        de.incremental_dump(path, tables, optimizer=optimizer, quiet=True)
        again = workloads.dumped()
        de.load(path, again, workloads.adagrad(again), quiet=True)
        expected = table_reader.contents(tables)
        assert table_reader.same(table_reader.contents(again), expected, COLUMNS)
        de.dump(path, tables, quiet=True)
        assert len(os.listdir(path)) == 2, f"files are left: {os.listdir(path)}"


@dataclasses.dataclass
class Outcome:
    """The crashes of a trace.

    Attributes:
        states: the number of states that were opened.
        failures: the crashes after which a state was not what it should be, and why.
    """

    states: int = 0
    failures: list[tuple[Crash, str]] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        if not self.failures:
            return f"{self.states} states"

        def size(failure: tuple[Crash, str]) -> tuple[int, int]:
            return sum(not op.is_ignored for op in failure[0].pending), failure[0].at

        crash, why = min(self.failures, key=size)
        return (
            f"{len(self.failures)} of {self.states} states are wrong; one of them:\n{crash}\n{why}"
        )


def explore(
    recording: Recording,
    trace: Iterable[Record],
    model: Model,
    opener: Callable[..., None],
    folder: pathlib.Path,
    samples: int,
    seed: int = 0,
    most_failures: int = 10**9,
    every: int = 1,
) -> Outcome:
    """Opens the states that crashes during a trace can leave.

    Args:
        recording: the workload.
        trace: its trace, or one with a fault.
        model: what a crash can do.
        opener: a `Tables` or `Dumps`.
        folder: for the states.
        samples: as of `replay.choices`.
        seed: of the random choices.
        most_failures: ends after this number of failures.
        every: opens one of this number of states, chosen at random.
    """
    outcome = Outcome()
    phase = Phase()

    def follow(record: Record) -> Phase:
        nonlocal phase
        phase = phase.after(json.loads(record.path))
        return phase

    rng = np.random.default_rng(seed)
    for crash in crashes(trace, model, opener.ignored, samples, seed, follow):
        if rng.integers(every):
            continue
        outcome.states += 1
        at = folder / "state"
        at.mkdir()
        crash.state.write(at)
        try:
            opener(at, recording, phase, outcome.states % 10 == 0)
        except Exception as error:
            outcome.failures.append((crash, f"{type(error).__name__}: {error}"))
        gc.collect()
        shutil.rmtree(at)
        if len(outcome.failures) >= most_failures:
            break
    return outcome
