"""Damaged dumps, for all that reads them: an error that names the file, or right rows.

After an error the reader has what it had before, and it reads the repaired file.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from damage_readers import CHECKSUMS, READERS, Dumped, Exported
from storage_helpers import flipped

from tf_dynemb.storage import DataLossError

LOSSES = (DataLossError, tf.errors.DataLossError)
OTHER_VERSION = (ValueError, tf.errors.InvalidArgumentError)
MANIFEST = "MANIFEST.json"

pytestmark = pytest.mark.filterwarnings("ignore:table 'item' has no optimizer state")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    return {made: made(tmp_path_factory.mktemp(made.__name__)) for made in (Dumped, Exported)}


@pytest.fixture(params=READERS, ids=lambda kind: kind.__name__)
def files(request, dumps, tmp_path):
    return Files(request.param, dumps[request.param.dump], tmp_path)


class Files:
    """A copy of a dump, whose files are damaged, and a reader of it."""

    def __init__(self, kind, dumped, folder):
        self.kind, self.dumped = kind, dumped
        self.path = folder / dumped.path.name
        shutil.copytree(dumped.path, self.path)
        self.files = [file for file in sorted(self.path.rglob("*.*")) if file.is_file()]
        assert len(self.files) == dumped.num_files
        self.reader, self.clock = None, itertools.count(10**18)

    def place(self, file) -> int:
        """Returns the number of the snapshot that has the file; 0 for others of a model."""
        name = file.parent.name
        return self.dumped.names.index(name) if name in self.dumped.names else 0

    def each(self, unread=False):
        """Yields files and their contents. They are whole again after the caller's damages.

        Args:
            unread: whether to yield files that the reader need not read, too.
        """
        files = [file for file in self.files if unread or self.kind.must_find(file)]
        for _, of_snapshot in itertools.groupby(files, self.place):
            self.reader = None
            for file in of_snapshot:
                content = file.read_bytes()
                yield file, content
                self.write(file, content)
            self.read_whole()

    def read_whole(self):
        """Reads sound files, with a reader that has met the damage."""
        reader = self.reader or self.kind(self.dumped, self.path)
        for _ in range(2):  # then nothing is new
            reader.read()
            assert reader.is_right()

    def write(self, file, content):
        """Replaces a file, or removes it. No file has the time of an earlier one."""
        if content is None:
            file.unlink()
            return
        file.write_bytes(content)
        now = next(self.clock)
        os.utime(file, ns=(now, now))

    def damage(self, file, content, whole, what, says="", times=1):
        """Replaces a file, whose sound content is `whole`, and checks what reading it does."""
        self.write(file, content)
        must_find = self.kind.must_find(file) and not self.is_harmless(file, content, whole)
        self.check(file, self.place(file), must_find, f"{file}, {what}", says, times)

    def is_harmless(self, file, content, whole) -> bool:
        """Returns whether a text has the same meaning, as with other white space.

        Without its checksums a model is read without them.
        """
        if file.name not in (MANIFEST, CHECKSUMS):
            return False
        if content is None:
            return file.name == CHECKSUMS
        try:
            return json.loads(content) == json.loads(whole)
        except (ValueError, RecursionError):
            return False

    def check(self, name, place, must_find, what, says="", times=1):
        """Reads. Checks that an error names `name`, or that all rows are right.

        Args:
            name: a path.
            place: the number of the damaged snapshot.
            must_find: whether an error is required.
            what: the damage.
            says: what the error says, as a regular expression.
            times: how many times to read.
        """
        for _ in range(times):
            if self.reader is None:
                self.reader = self.kind(self.dumped, self.path)
            error = None  # only its type: its frames would keep the handles of tables
            try:
                self.reader.read()
            except (*LOSSES, *OTHER_VERSION) as raised:
                error, message = type(raised), str(raised)
            if error is None:
                assert not must_find, f"{what}: no error"
                assert self.reader.is_right(), f"{what}: wrong rows"
                self.reader = None
                continue
            assert str(name) in message, f"{what}: {message!r} names another file, or none"
            assert re.search(says, message), f"{what}: {message!r}"
            assert self.reader.has_kept(place), f"{what}: {message!r}, but there was a change"
            other_version = name.suffix == ".json" and "is of version" in message
            assert issubclass(error, LOSSES) != other_version, f"{what}: {error}: {message!r}"


def test_missing_files(files):
    for file, content in files.each(unread=True):
        files.damage(file, None, content, "missing", "is missing", times=2)


def test_truncated_and_longer_files(files):
    for file, content in files.each():
        size = len(content)
        for end in sorted({0, 127, 128, size // 2, size - 2, size - 1}):
            if end < size:
                files.damage(file, content[:end], content, f"{end} of {size} bytes")
        files.damage(file, content + b"\0", content, "with another byte")


def test_flips_at_the_limits(files):
    for file, content in files.each():
        size = len(content)
        # The end of the header, and the first and the last bytes of the data.
        for offset in sorted({0, 127, 128, size // 2, size - 3} & set(range(size))):
            says = "is damaged.* byte offset 0" if file.suffix == ".npy" else ""
            changed = flipped(content, offset)
            files.damage(file, changed, content, f"a flip in byte {offset}", says, times=2)


def test_files_in_the_place_of_others(files):
    """Of the same snapshot with the same size, and of another snapshot with the same name."""
    contents = {file: file.read_bytes() for file in files.files}
    number = 0
    for file, content in files.each():
        for other, instead in contents.items():
            same_place = file.parent == other.parent and len(content) == len(instead)
            if instead != content and (same_place or file.name == other.name):
                files.damage(file, instead, content, f"which is {other}")
                number += 1
    assert number > 20 or files.kind.dump is Exported


DAMAGED_MANIFESTS = {
    "empty": (lambda text: "", "damaged: it is not JSON"),
    "without an end": (lambda text: text[:-2], "damaged: it is not JSON"),
    "no object": (lambda text: "[]", ""),
    "of another format": (lambda text: text.replace("tf_dynemb.snapshot", "x"), "format"),
    "with a name twice": (lambda text: text.replace('"since"', '"watermark"'), "not JSON"),
    "of other ranks": (lambda text: text.replace('"world_size": 1', '"world_size": 2'), "CRC32C"),
    "of a later version": (lambda text: re.sub('("version": )2', r"\g<1>9", text), "of version 9"),
    "that is not UTF-8": (lambda text: text.replace('"writer": "', '"writer": "\udcff'), ""),
}
for depth in (60, 100, 900, 5000, 10**6):
    DAMAGED_MANIFESTS[f"with {depth} lists in each other"] = (
        lambda text, depth=depth: f'{text[:-2]}, "x": {"[" * depth}{"]" * depth}}}',
        "is damaged",
    )


def test_damaged_manifests(files):
    for file, content in files.each():
        if file.name == MANIFEST:
            text = content.decode()
            for what, (change, says) in DAMAGED_MANIFESTS.items():
                changed = change(text).encode(errors="surrogateescape")
                assert changed != content
                files.damage(file, changed, content, what, says)


def test_a_manifest_that_is_too_large(files):
    """It is refused without being read."""
    for file, content in files.each():
        if file.name == MANIFEST and file.parent.name == files.dumped.names[-1]:
            files.write(file, content)
            os.truncate(file, 2**28 + 1)
            says = f"more than {2**28} bytes"
            files.check(file, files.place(file), True, "a large manifest", says)


def test_a_missing_delta(files):
    if files.kind.dump is Exported:
        return
    _, missing, last = (files.path / name for name in files.dumped.names)
    missing.rename(files.path / "away")
    files.check(last, 1, True, "a gap", f"a gap before .*{last.name}", times=2)
    (files.path / "away").rename(missing)
    files.read_whole()


@pytest.mark.slow
def test_random_flips_and_lengths(files):
    rng = np.random.default_rng(1)
    for file, content in files.each():
        size, samples = len(content), files.kind.samples
        offsets = rng.choice(size, min(samples, size), replace=False).tolist()
        if file.name == MANIFEST and files.place(file) == 1 and samples >= 40:
            # What the delta continues: a wrong value may be valid.
            offsets += range(content.index(b'"format"'), content.index(b'"writer"'))
        for offset in offsets:
            bit = int(rng.integers(8))
            changed = flipped(content, offset, bit)
            files.damage(file, changed, content, f"a flip of bit {bit} of byte {offset}")
        for end in rng.choice(size, min(max(5, samples // 10), size), replace=False).tolist():
            files.damage(file, content[:end], content, f"{end} of {size} bytes")
