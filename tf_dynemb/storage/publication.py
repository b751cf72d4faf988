"""Writing of a snapshot, which becomes visible as a whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tf_dynemb._version import __version__
from tf_dynemb.format import crc32c
from tf_dynemb.format.errors import DataLossError
from tf_dynemb.format.manifest import KINDS, MOST_AFTER, DenseFile, Manifest
from tf_dynemb.format.table_entry import TableEntry
from tf_dynemb.storage.part import BLOCK_BYTES, Part, check_block_bytes
from tf_dynemb.storage.places import AnyPlace, place_of
from tf_dynemb.storage.snapshot import Name, Snapshot, next_number, since_last_base, superseded


class Publication:
    """A snapshot being written; leaving the `with` before `publish` discards it.

        with Publication(path, "base") as publication:
            keys = publication.part.column(0, "keys", np.int64)
            keys.append(...)
            publication.publish(...)

    Other processes can write parts of it meanwhile: `place.part(folder, rank, ...)`.

    Args:
        path: the path, URL or place of the chain; a path is created if it does not exist.
        kind: "base" or "delta".
        checksum: a faster function that is equivalent to `crc32c.blocks`.
        block_bytes: the number of bytes that one checksum covers, at least 128.

    Attributes:
        id: the id of the snapshot, 32 hexadecimal digits.
        place: the place of the chain.
        folder: the name of the folder there that the snapshot is written to; known after entering.
        part: the part of this process; known after entering.

    Raises:
        ValueError: `kind` has another value, or `block_bytes` is below 128; or as `place_of`.
        RuntimeError: another process writes at this path; raised on entering.
        OSError: an error of the file system or store; raised on entering.
    """

    folder: str
    part: Part

    def __init__(
        self,
        path: AnyPlace,
        kind: str,
        checksum: crc32c.Checksum = crc32c.blocks,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
        check_block_bytes(block_bytes)
        self.id = secrets.token_hex(16)
        self.place = place_of(path)
        self._kind = kind
        self._checksum = checksum
        self._block_bytes = block_bytes
        self._writing = contextlib.ExitStack()

    def __enter__(self) -> Publication:
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(self.place.writing(self._kind, self.id))
            self.part = self.place.part(self.folder, 0, self._checksum, self._block_bytes)
            stack.callback(self.part.abandon)
            self._writing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._writing.close()

    @functools.cached_property
    def last(self) -> Manifest | None:
        """The manifest of the last snapshot at the path, which a delta must continue.

        Raises:
            DataLossError: the manifest is damaged.
        """
        names = self.place.names()
        return self._manifest(names[-1]) if names else None

    @property
    def superseded(self) -> tuple[Manifest, Manifest] | None:
        """The first and the last manifest of the chain that a base replaces; None: there is none.

        Raises:
            DataLossError: one of them is damaged.
        """
        names = since_last_base(self.place.names())
        if not names or self.last is None:
            return None
        return self._manifest(names[0]) if len(names) > 1 else self.last, self.last

    def _manifest(self, name: Name) -> Manifest:
        return self.place.open([str(name)])[0].manifest

    def publish(
        self,
        tables: Sequence[TableEntry],
        *,
        since: int = 0,
        watermark: int,
        watermark_utc_ns: int,
        parent: str | None = None,
        optimizer: Mapping[str, Any] | None = None,
        world_size: int = 1,
        continues: Sequence[str] = (),
        after: Sequence[str] = (),
        keep: int = 0,
        dense: Sequence[DenseFile] | None = None,
        extra: Mapping[str, Any] | None = None,
        copy: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Makes the snapshot visible. From then on it survives crashes.

        Args:
            tables: as for `with_files`; shards that other processes wrote have their files.
            since: for a delta, the tick after which all updated rows are in it.
            watermark: the tick up to which every change is in the snapshot.
            watermark_utc_ns: the time of the watermark, in nanoseconds since 1970 UTC.
            parent: for a delta, the id of the snapshot that it continues. If the path has
                snapshots, it must be the last one.
            optimizer: the optimizer's entry in the manifest.
            world_size: the number of ranks that wrote.
            continues: for a base, the ids of snapshots that have the same state.
            after: for a base, the ids of snapshots whose tables became these, the latest last. The
                last `MOST_AFTER` are written.
            keep: for a base, the number of bases before it that stay at the path, each with its
                deltas. All others are removed.
            dense: the files of dense variables, also of other processes. None: those that this
                process has written.
            extra: an object of the user.
            copy: the member of a served copy.

        Returns:
            The published snapshot.

        Raises:
            ValueError: the entries and the files that were written do not form a snapshot, or the
                parent is not the path's last snapshot. Nothing is published.
            OSError: an error of the file system. The snapshot is published only if it was the last
                sync that failed.
        """
        before = self.place.names()
        if self._kind == "delta" and before and not self._is_continued(before[-1], parent):
            raise ValueError(
                f"parent is {parent!r}, but the last snapshot at {self.place} is {before[-1]}: "
                "with this delta the path's chain would have a gap."
            )
        tables = self.part.with_files(tables)
        manifest = Manifest(
            kind=self._kind,
            id=self.id,
            parent=parent,
            since=since,
            watermark=watermark,
            watermark_utc_ns=watermark_utc_ns,
            world_size=world_size,
            writer=f"tf_dynemb {__version__}",
            block_bytes=self._block_bytes,
            optimizer=optimizer,
            tables=tables,
            continues=tuple(continues),
            after=tuple(after)[-MOST_AFTER:],
            dense=tuple(self.part.dense if dense is None else dense),
            extra=extra,
            copy=copy,
        )
        self._check_files(manifest)
        text = manifest.to_json()
        try:
            Manifest.from_json(text, str(self.place))
        except DataLossError as error:
            raise ValueError(f"these entries do not form a snapshot: {error}") from error
        name = Name(next_number(before), self._kind, self.id)
        snapshot = self.place.publish(self.folder, name, manifest)
        if self._kind == "base":
            with contextlib.suppress(OSError):  # it is published; the next base removes them
                self.place.remove(superseded(self.place.names(), keep))
        return snapshot

    def _is_continued(self, last: Name, parent: str | None) -> bool:
        """Whether a delta with this parent continues the path's last snapshot."""
        if last.id == parent or last.kind == "delta":
            return last.id == parent
        return parent in self._manifest(last).ids

    def _check_files(self, manifest: Manifest) -> None:
        """Raises ValueError unless this process sees all files that were written."""
        sizes = self.place.sizes(self.folder)
        for file, rank in manifest.files_of_ranks:
            size = sizes.get(file.file, 0)
            if size != file.bytes:
                raise ValueError(
                    f"{self.place}/{self.folder}/{file.file} has {size} bytes, but rank {rank} has "
                    f"written {file.bytes}: all ranks must share the file system of {self.place}."
                )


def prune(path: AnyPlace, keep: int = 0) -> list[Name]:
    """Removes the superseded snapshots at a path, except the snapshots of the last `keep` bases.

    Returns:
        The names of the removed snapshots.

    Raises:
        FileNotFoundError: there is no snapshot at the path.
        RuntimeError: another process writes at the path.
        OSError: an error of the file system or store.
    """
    place = place_of(path)
    if not place.names():
        raise place.absent()
    with place.locked():
        gone = superseded(place.names(), keep)
        place.remove(gone)
    return gone
