"""Snapshots that all ranks write together: each rank writes a part, and rank 0 publishes all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_dynemb import storage
from tf_dynemb.format.table_entry import tables_from_json, tables_to_json
from tf_dynemb.parallel.agreement import Ranks, check_alike
from tf_dynemb.persistence import columns
from tf_dynemb.persistence.shared_path import wait_for
from tf_dynemb.persistence.watermark import Watermark
from tf_dynemb.storage.local_place import LocalPlace
from tf_dynemb.storage.part import BLOCK_BYTES
from tf_dynemb.storage.places import place_of
from tf_dynemb.tables.cut import Cut, advance_clock, last_tick


class JointPublication:
    """A snapshot that all ranks write; leaving the `with` before `publish` discards it.

        with JointPublication(ranks, path, "base") as publication:
            with publication.beginning():
                ...                                   # check arguments
                publication.is_of(described(tables), histories)
            with publication.writing() as part:
                ...                                   # write columns
                publication.has(entries, cut)
            publication.publish(optimizer=None)

    `beginning`, `writing` and `publish` are stages of the ranks: if one fails on a rank, it fails
    on all.

    Args:
        ranks: the ranks, all of which write.
        path: the path of the chain; rank 0 locks it.
        kind: "base" or "delta".

    Attributes:
        last: for a delta, the manifest of the last snapshot at the path, without shards.
        histories: the histories of the tables on rank 0, which the tables of all ranks take over.
    """

    def __init__(self, ranks: Ranks, path: str | os.PathLike[str], kind: str) -> None:
        self.last: storage.Manifest | None = None
        self._ranks = ranks
        self._path = path
        self._kind = kind
        self.histories: list[str] = []
        self._call: list[str] = []
        self._begun = contextlib.ExitStack()
        self._publication: storage.Publication | None = None  # on rank 0
        self._id = self._folder = ""
        self._tick = 0  # the last batch of any rank when the snapshot began
        self._part: dict[str, Any] = {}
        self._parts: list[dict[str, Any]] = []  # of all ranks

    def __enter__(self) -> JointPublication:
        return self

    def __exit__(self, *_: object) -> None:
        self._begun.close()

    def is_of(self, call: Sequence[str], histories: Sequence[str]) -> None:
        """Describes what is written. The end of `beginning` compares it with the other ranks.

        Args:
            call: a description that must be the same on all ranks.
            histories: the histories of the tables on this rank.
        """
        self._call = list(call)
        self.histories = list(histories)

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """A stage after which the path is locked, and the ranks have agreed on what they write."""
        with self._ranks.stage() as stage:
            place_of(self._path)  # raises unless it is one
            yield
            id_ = folder = last = None
            if self._ranks.rank == 0:
                publication = storage.Publication(self._path, self._kind, columns.checksum)
                self._publication = self._begun.enter_context(publication)
                id_, folder = publication.id, publication.folder
                if self._kind == "delta" and publication.last is not None:
                    last = publication.last.without_shards().to_json()
            stage.say([self._call, last_tick(), id_, folder, last, self.histories])
        calls, ticks, ids, folders, lasts, histories = zip(*stage.said, strict=True)
        check_alike(calls, "the variables")
        self._tick = max(ticks)
        self._id, self._folder = ids[0], folders[0]
        self.histories = histories[0]
        if lasts[0] is not None:
            self.last = storage.Manifest.from_json(lasts[0], str(self._path))

    @property
    def publication(self) -> storage.Publication | None:
        """The publication; None on all ranks but 0."""
        return self._publication

    @contextlib.contextmanager
    def writing(self) -> Iterator[storage.Part]:
        """Yields this rank's part; afterwards every rank has written and synced its part.

        A cut that starts at once has the same tick on all ranks. If no other thread trains, it is
        also of the same moment.
        """
        with self._ranks.stage() as stage:
            part = self._publication.part if self._publication else self._open_part()
            try:
                advance_clock(self._tick)
                yield part
                tables = part.with_files(self._part.pop("tables"))
                dense = [dataclasses.asdict(file) for file in part.dense]
                stage.say({**self._part, "tables": tables_to_json(tables), "dense": dense})
            finally:
                # Some file systems cannot remove files that are still open.
                part.abandon()
        self._parts = stage.said
        check_alike([part["parent"] for part in self._parts], "the snapshot to continue")

    def has(
        self,
        tables: Sequence[storage.TableEntry],
        cut: Cut,
        parent: str | None = None,
        since: int = 0,
    ) -> None:
        """Describes the tables that this rank has written. The end of `writing` tells all ranks.

        Args:
            tables: the entries of the tables; the same on all ranks, except for their shards.
            cut: the cut whose rows were written.
            parent: the parent of a delta, as in the manifest; the same on all ranks.
            since: for a delta, the latest tick after which all updated rows are in it.
        """
        self._part = {
            "tables": tables,
            "tick": cut.tick,
            "utc_ns": cut.utc_ns,
            "parent": parent,
            "since": since,
        }

    def publish(
        self,
        optimizer: Mapping[str, Any] | None,
        after: Sequence[str] = (),
        keep: int = 0,
        unless_unchanged: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> Watermark:
        """Makes the snapshot visible.

        Args:
            optimizer: the optimizer's entry in the manifest; only rank 0's is used.
            after: as in `storage.Publication.publish`; only rank 0's is used.
            keep: likewise.
            unless_unchanged: whether a delta that changes nothing is discarded instead.
            extra: the user's object in the manifest; only rank 0's is used.

        Returns:
            The snapshot's watermark, the latest of all ranks. If the delta was discarded, the
            watermark of the last snapshot at the path.
        """
        tick, utc_ns, since = (
            max(part[name] for part in self._parts) for name in ("tick", "utc_ns", "since")
        )
        with self._ranks.stage() as stage:
            if self._publication is not None:
                parts = [
                    tables_from_json(part["tables"], f"rank {rank}")
                    for rank, part in enumerate(self._parts)
                ]
                tables = storage.joined(parts)
                dense = [
                    storage.DenseFile(**file) for part in self._parts for file in part["dense"]
                ]
                last = self._publication.last if unless_unchanged else None
                if (
                    last is not None
                    and (tuple(dense), extra) == (last.dense, last.extra)
                    and not _has_changes(tables, optimizer, last)
                ):
                    stage.say("unchanged")
                else:
                    self._publication.publish(
                        tables,
                        since=since,
                        watermark=tick,
                        watermark_utc_ns=utc_ns,
                        parent=self._parts[0]["parent"],
                        optimizer=optimizer,
                        world_size=self._ranks.size,
                        after=after,
                        keep=keep,
                        dense=dense,
                        extra=extra,
                    )
        if stage.said[0] == "unchanged":
            assert self.last is not None
            return Watermark.of(self.last)
        return Watermark.at(self._id, tick, utc_ns, extra)

    def _open_part(self) -> storage.Part:
        place = place_of(self._path)
        if isinstance(place, LocalPlace):
            wait_for(place.path / self._folder, self._ranks.rank)
        return place.part(self._folder, self._ranks.rank, columns.checksum, BLOCK_BYTES)


def _has_changes(
    tables: Sequence[storage.TableEntry],
    optimizer: Mapping[str, Any] | None,
    last: storage.Manifest,
) -> bool:
    """Returns whether a delta of these tables says anything that the snapshot before it does not.

    Besides rows, a delta has counters of keys, the steps of an optimizer that rows make up for, the
    optimizer's own state, and times by which rows age. Wall time alone is no change.
    """
    if optimizer is not None and _settings(optimizer) != _settings(last.optimizer or {}):
        return True
    before = {entry.name: entry for entry in last.tables}
    for entry in tables:
        known = before.get(entry.name)
        if known is None or any(shard.rows or shard.deleted for shard in entry.shards):
            return True
        if entry.steps[:1] != known.steps[:1]:
            return True
        if entry.ttl_clock != "wall" and entry.expiry_marks[-1:] != known.expiry_marks[-1:]:
            return True
        if _counters(entry) != _counters(known):
            return True
    return False


def _settings(optimizer: Mapping[str, Any]) -> Any:
    """Returns an optimizer's entry, as JSON has it, without the name that Keras numbers."""
    entry = json.loads(json.dumps(optimizer))
    entry.get("config", {}).pop("name", None)
    return entry


def _counters(entry: storage.TableEntry) -> dict[int, str]:
    """Returns the checksums of the files of admission counters, by rank."""
    return {
        shard.rank: shard.files["admission"].crc32c
        for shard in entry.shards
        if "admission" in shard.files
    }
