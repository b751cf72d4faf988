"""`forget`: removes the rows of keys from dumps, deltas, flushes and SavedModels."""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Sequence

from tf_dynemb._presence import remove_tree
from tf_dynemb.chains import copies, flushes
from tf_dynemb.chains import forget as snapshots
from tf_dynemb.chains.copies import Copy, Query
from tf_dynemb.cli import keys, paths
from tf_dynemb.storage import Snapshot, TableEntry
from tf_dynemb.storage.files import sync_directory
from tf_dynemb.storage.local_place import locked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("paths", metavar="PATH", nargs="+", type=paths.argument)
    parser.add_argument(
        "--keys",
        metavar="KEY",
        nargs="+",
        action="extend",
        help="strings, if the table has them; --keys=-TEXT, if one begins with a dash",
    )
    keys.add_arguments(parser)
    parser.add_argument(
        "--table", metavar="T", action="append", help="a table; needed if there are several"
    )
    parser.add_argument(
        "--deletions",
        action="store_true",
        help="also remove the keys from the lists of deleted keys in deltas; only when every "
        "reader and served model has applied these",
    )


def run(options: argparse.Namespace) -> int:
    """Removes the rows of keys from all snapshots, flushes and SavedModels below the paths.

    Ids of snapshots and the order of chains stay. Everything is verified before the first change.
    """
    texts = keys.of(options, options.keys)
    places = copies.places(options.paths)
    if not places:
        raise FileNotFoundError(
            f"there is no snapshot, flush or SavedModel with tables below "
            f"{', '.join(map(str, options.paths))}."
        )
    entries = _entries(places)
    tables = _tables(places, entries, options.table)
    forms = {(entry.name, entry.key_type, entry.string_hash): entry for entry in entries}
    for entry in forms.values():
        if entry.name in tables:
            keys.parse(texts, entry, options.integer_keys)  # raises for what is no key
    query = Query(tuple(texts), options.integer_keys)
    hashes = {entry.name: entry.string_hash is not None for entry in entries}
    work = []
    listed: list[Copy] = []
    for place in places:
        if copies.is_snapshot(place):
            snapshot = Snapshot(place)
            found = list(copies.in_snapshot(snapshot, query, tables))
            kept = [each for each in found if each.what == "deleted" and not options.deletions]
            listed += kept
            if len(found) > len(kept):
                snapshots.check(snapshot, query, tables)
                work.append(place)
        elif copies.is_flush(place):
            name = copies.table_of_flush(place)
            if name not in tables:
                continue
            if copies.is_unfinished_flush(place):
                work.append(place)
            elif any(copies.in_flush(place, query, hashes.get(name))):
                flushes.Flush(place).verify()
                work.append(place)
        elif not copies.is_running(place):
            work.append(place)
    done = _forget(work, query, tables, hashes, options.deletions)
    for place in places:
        if copies.is_running(place):
            print(f"{place}: the files of a running process: call table.forget there")
    if not done:
        print("nothing to remove")
    if listed:
        count = len({each.place for each in listed})
        print(
            f"{count} snapshots still list keys as deleted. When every reader and served model has "
            "applied them, pass --deletions"
        )
    return 0


def _entries(places: Sequence[pathlib.Path]) -> list[TableEntry]:
    found = map(Snapshot, filter(copies.is_snapshot, places))
    return [entry for snapshot in found for entry in snapshot.manifest.tables]


def _tables(
    places: Sequence[pathlib.Path], entries: Sequence[TableEntry], wanted: Sequence[str] | None
) -> list[str]:
    """Returns the names of the tables to remove keys from."""
    flush_tables = map(copies.table_of_flush, filter(copies.is_flush, places))
    there = list(dict.fromkeys([*(entry.name for entry in entries), *flush_tables]))
    names = ", ".join(map(repr, there)) or "none"
    if wanted is None:
        if len(there) > 1:
            raise ValueError(
                f"a key means a different thing in each of the tables {names}: choose tables with "
                "--table, once for each."
            )
        return there
    for name in wanted:
        if name not in there:
            raise KeyError(f"no table {name!r}: there are {names}.")
    return list(wanted)


def _forget(
    work: Sequence[pathlib.Path],
    query: Query,
    tables: Sequence[str],
    hashes: dict[str, bool],
    deletions: bool,
) -> bool:
    """Removes the keys from these places; returns whether something was removed."""
    done = False
    for folder, folder_places in itertools.groupby(work, _lock_of):
        if _has_flushes(folder):
            with locked(folder, flushes.in_use(folder)):
                for place in folder_places:
                    done |= _forget_in_flush(place, query, hashes)
            continue
        with locked(folder):
            for place in folder_places:
                if not copies.is_snapshot(place):
                    remove_tree(place)
                    sync_directory(folder)
                    print(f"{place}: the remains of a killed process were removed")
                    done = True
                    continue
                removed = snapshots.forget(Snapshot(place), query, tables, deletions)
                for name, rows in removed.items():
                    other = "removed from the deleted keys or the admission counters"
                    what = f"rows removed: {rows}" if rows else other
                    print(f"{place}: table {name!r}: {what}")
                done = True
    return done


def _has_flushes(folder: pathlib.Path) -> bool:
    """Whether a folder has the flushes of a persistent table."""
    return folder.name.endswith(flushes.ENDING)


def _lock_of(place: pathlib.Path) -> pathlib.Path:
    """Returns the folder whose lock protects a place."""
    if copies.is_snapshot(place):
        return snapshots.lock_of(place)
    return place.resolve().parent if copies.is_flush(place) else place.parent


def _forget_in_flush(place: pathlib.Path, query: Query, hashes: dict[str, bool]) -> bool:
    name = copies.table_of_flush(place)
    if copies.is_unfinished_flush(place):
        remove_tree(place)
        sync_directory(place.parent)
        print(f"{place}: the remains of a killed process were removed")
        return True
    rows = sum(
        each.keys for each in copies.in_flush(place, query, hashes.get(name)) if each.what == "row"
    )
    flushes.Flush(place).forget(query.bits(hashes.get(name)))
    print(f"{place}: table {name!r}: rows removed: {rows}")
    return True
