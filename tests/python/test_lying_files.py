"""Snapshots whose checksums are right and whose contents are not: the right answer, or an error.

Somebody changed a manifest or a column, and computed the checksums again.
"""

from __future__ import annotations

import copy
import json
import random
import warnings

import numpy as np
import pytest
import tensorflow as tf
from chain_writer import publish
from served_helpers import describe, lookup, opened
from serving_helpers import delta, plain

import tf_dynemb as de
from tf_dynemb.format import crc32c
from tf_dynemb.format.manifest import checksum_of
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain, DataLossError

KEYS = [1, 2, 3, 4, 5]
VALUES = [20, 1, -1, 21, -1]
ERRORS = (ValueError, OSError, tf.errors.DataLossError, tf.errors.InvalidArgumentError)

NUMBERS = [0, 1, -1, 2, 3, 127, 128, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**61, 2**62, 2**63]
OTHERS = [2**64 - 1, 2**64, 1e308, 0.5, "", "x", "../x", "MANIFEST.json", None, [], {}, True, [[]]]

# No reader can know these: other salts, seeds and rows without keys are as good.
CONTENT = {"index_salt", "seed", "args", "kinds", "padding_id", "default_vector", "string_hash"}


@pytest.fixture
def chain(tmp_path):
    """Rows 0, 1, 2 of the keys 1, 2, 3; then 1 and 4 have the rows 20 and 21, and 3 is deleted."""
    path = tmp_path / "chain"
    base = publish(path, "base", plain([1, 2, 3]), watermark=10, ranks=2)
    delta(path, plain([1, 4], 20, deleted=[3]), base, 10, 20, ranks=2)
    return path


def seal(directory, members) -> None:
    members.pop("crc32c", None)
    members["crc32c"] = f"{checksum_of(members):08x}"
    (directory / "MANIFEST.json").write_text(json.dumps(members))


def whole(path, **options) -> Reader:
    """Returns a reader that has all of a chain; it only warns if it has the first snapshots."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reader = Reader(path, **options)
    if said:
        raise DataLossError(str(said[0].message))
    return reader


def answers_of_reader(path):
    reader = whole(path, verify=True)
    return reader.lookup(KEYS, "plain", default=-1.0)[:, 0].tolist()


def answers_of_operators(tmp_path, path):
    table = de.DynamicVariable(3, -1.0, "host", name="plain")
    return lookup(opened(table, describe(tmp_path, path)), KEYS).numpy()[:, 0].tolist()


def places(value, at=()):
    """Returns the places of all values in a manifest, apart from the optional content."""
    found = [at] if at else []
    inside = value.items() if isinstance(value, dict) else []
    inside = enumerate(value) if isinstance(value, list) else inside
    for name, each in inside:
        if name not in CONTENT:
            found += places(each, (*at, name))
    return found


def change(members, rng) -> str:
    """Changes a random value of a manifest; returns what was done."""
    *way, last = rng.choice(places(members))
    inside = members
    for name in way:
        inside = inside[name]
    value, how = inside[last], rng.randrange(5)
    if how == 0 and isinstance(inside, dict):
        del inside[last]
    elif how == 1 and isinstance(inside, list):
        inside.insert(last, copy.deepcopy(value))
    elif how == 2 and isinstance(value, int):
        inside[last] = value + rng.choice([-1, 1, 2**32, 2**63, 2**64])
    else:
        inside[last] = copy.deepcopy(rng.choice(NUMBERS if isinstance(value, int) else OTHERS))
    return f"{[*way, last]}: {value!r:.60} ({how})"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_changes_of_manifests(tmp_path, chain, seed):
    rng = random.Random(seed)
    refused = 0
    directories = sorted(path for path in chain.iterdir() if path.is_dir())
    for _ in range(150):
        directory = rng.choice(directories)
        file = directory / "MANIFEST.json"
        before = file.read_text()
        members = json.loads(before)
        done = [change(members, rng) for _ in range(rng.choice([1, 1, 2]))]
        seal(directory, members)
        for read in (answers_of_reader, lambda path: answers_of_operators(tmp_path, path)):
            try:
                assert read(chain) == VALUES, done
            except ERRORS:
                refused += 1
        file.write_text(before)
    assert 100 < refused < 300


def rewrite(directory, name, content):
    """Replaces a column of a snapshot of one shard."""
    members = json.loads((directory / "MANIFEST.json").read_text())
    entry = members["tables"][0]["shards"][0]
    (directory / entry["files"][name]["file"]).write_bytes(content)
    blocks = [content[i : i + 4096] for i in range(0, len(content), 4096)]
    digits = "".join(f"{crc32c.crc32c(block):08x}" for block in blocks)
    entry["files"][name].update(bytes=len(content), crc32c=digits)
    seal(directory, members)


def with_data(snapshot, column, values):
    shard = snapshot.manifest.tables[0].shards[0]
    path = snapshot.directory / shard.files[column].file
    return path.read_bytes()[:128] + np.asarray(values).tobytes()


@pytest.mark.parametrize("column", ["keys", "deleted"])
def test_a_key_twice_in_a_delta(tmp_path, column):
    path = tmp_path / "chain"
    base = publish(path, "base", plain([1, 2, 3]), watermark=10)
    snapshot = delta(path, plain([1, 4], 20, deleted=[3, 2]), base, 10, 20)
    same = [1, 1] if column == "keys" else [4, 3]
    rewrite(snapshot.directory, column, with_data(snapshot, column, np.int64(same)))
    with pytest.raises(DataLossError, match=r"'plain'.* twice"):
        whole(path)
    with pytest.raises(tf.errors.DataLossError, match=r"'plain'.* twice"):
        answers_of_operators(tmp_path, path)


def test_a_watermark_before_its_parent(tmp_path, chain):
    """The delta would look as if the base had its changes."""
    last = Chain.open(chain).last
    members = json.loads((last.directory / "MANIFEST.json").read_text())
    members["watermark"] = 9
    seal(last.directory, members)
    with pytest.raises(DataLossError, match="less than"):
        whole(chain)
    with pytest.raises(tf.errors.DataLossError, match="less than"):
        answers_of_operators(tmp_path, chain)
