"""A place of snapshots: what a path of a file system and the URL of a store have in common."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from tf_dynemb.format import crc32c
from tf_dynemb.format.manifest import Manifest
from tf_dynemb.storage.part import Part
from tf_dynemb.storage.snapshot import Name, Snapshot


class Place(abc.ABC):
    """A place of snapshots, which appear there as a whole or not at all.

    str(place) is the path or URL. All methods raise OSError for errors of the file system or store.
    """

    @property
    @abc.abstractmethod
    def is_snapshot(self) -> bool:
        """Whether it is the directory of one snapshot, instead of a place of snapshots."""

    @abc.abstractmethod
    def names(self, begin: str = "") -> list[Name]:
        """Returns the names of all snapshots in order of publication; none if there is nothing.

        Args:
            begin: the name of a snapshot; if it is there, those before it can be left out.

        Raises:
            DataLossError: a snapshot is missing, as far as the names show it.
        """

    @abc.abstractmethod
    def absent(self) -> FileNotFoundError:
        """Returns the error for a place without snapshots, which says what is there."""

    @abc.abstractmethod
    def open(self, names: Sequence[str]) -> list[Snapshot]:
        """Opens snapshots by their names; if there are no names, the one that this place is.

        Raises:
            DataLossError: a manifest is missing or damaged.
            ValueError: a snapshot has a version that this code does not read.
        """

    @abc.abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """A context in which no other process writes here, where processes can be kept from it.

        Raises:
            RuntimeError: another process writes here.
        """

    @abc.abstractmethod
    def writing(self, kind: str, id_: str) -> AbstractContextManager[str]:
        """A context in which this process writes a snapshot, in a folder that is not visible yet.

        The folder of a snapshot that is not published in the context is removed after it.

        Args:
            kind: "base" or "delta".
            id_: the id of the snapshot.

        Yields:
            The name of the folder.

        Raises:
            RuntimeError: another process writes here.
        """

    @abc.abstractmethod
    def part(self, folder: str, rank: int, checksum: crc32c.Checksum, block_bytes: int) -> Part:
        """Returns a part of the snapshot, for this or another process to write; see `Part`."""

    @abc.abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the sizes of the files in the folder, by name.

        Raises:
            RuntimeError: another process has published a snapshot, as the last `names` has shown.
        """

    @abc.abstractmethod
    def publish(self, folder: str, name: Name, manifest: Manifest) -> Snapshot:
        """Makes the snapshot in the folder visible; it survives crashes from then on.

        Args:
            folder: the name of the folder.
            name: the name of the snapshot, with the number after that of the last one.
            manifest: the manifest, which is written as the last file.

        Raises:
            RuntimeError: another process has published a snapshot meanwhile.
        """

    @abc.abstractmethod
    def remove(self, names: Iterable[Name]) -> None:
        """Removes snapshots."""
