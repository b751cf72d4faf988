"""Reader with invalid chains, in threads, and with random sequences of snapshots.

`test_damage.py` damages files.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading

import numpy as np
import pytest
from chain_writer import Change, Form, Row, publish
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_helpers import FORMS, WIDEN, delta, first_column, plain, row, rows
from storage_helpers import flip

from tf_dynemb.serving import Reader
from tf_dynemb.serving.overlay import GROWTH, Overlay, push
from tf_dynemb.storage import DataLossError


@pytest.fixture
def base(tmp_path):
    """Publishes rows 0, 1, 2 with keys 1, 2, 3 at tick 10."""
    return publish(tmp_path / "chain", "base", plain([1, 2, 3]), watermark=10)


@pytest.fixture
def path(base):
    return base.directory.parent


@pytest.mark.parametrize("form", [Form(4), Form(3, "int32"), Form(3, "int64", "float16")])
def test_delta_with_another_schema(base, path, form):
    reader = Reader(path)
    change = {"plain": Change(rows([1], 20, form))}
    publish(
        path,
        "delta",
        change,
        parent=base.manifest.id,
        since=10,
        watermark=20,
        forms={"plain": form},
    )
    with pytest.raises(DataLossError, match="Schema"):
        reader.follow()
    assert first_column(reader, [1]) == [0]


def test_delta_with_an_unknown_table(base, path):
    reader = Reader(path)
    other = {"half": Change(rows([1], 20, FORMS["half"]))}
    snapshot = delta(path, {**plain([1], 20), **other}, base, 10, 20)
    with pytest.raises(DataLossError, match=f"{snapshot.directory.name}.*'half'.*'plain'"):
        reader.follow()
    assert first_column(reader, [1]) == [0]


def test_base_is_verified_on_request(base, path):
    file = base.directory / "000.r0.vectors.npy"
    flip(file, file.stat().st_size - 1)
    assert Reader(path).size() == 3
    with pytest.raises(DataLossError, match="vectors"):
        Reader(path, verify=True)


def test_index_out_of_range_is_refused(base, path):
    file = base.directory / "000.r0.index.npy"
    index = np.lib.format.open_memmap(file, "r+")
    index[index != 0] = 1000
    index.flush()
    reader = Reader(path)
    with pytest.raises(DataLossError, match="index"):
        reader.lookup([1, 2, 3])


def test_new_base_removes_a_listed_delta(base, path, monkeypatch):
    """The delta disappears after the reader has listed it, and before it is read."""
    reader = Reader(path)
    delta(path, plain([1], 20), base, 10, 20)
    whole = Reader._apply

    def apply(self, *args):
        monkeypatch.setattr(Reader, "_apply", whole)
        publish(path, "base", plain([1], 50), watermark=30)
        return whole(self, *args)

    monkeypatch.setattr(Reader, "_apply", apply)
    assert reader.follow() == 1
    assert (first_column(reader, [1]), reader.watermark) == ([50], 30)


def test_threads_see_whole_snapshots(tmp_path):
    """Each snapshot writes its version into all tables; no lookup may see two versions."""
    form = {"a": Form(4), "b": Form(2)}
    keys = np.arange(200)

    def version(number, changed_keys):
        return {
            name: Change(
                {int(k): Row(np.full(f.dimension, number, np.float32)) for k in changed_keys}
            )
            for name, f in form.items()
        }

    snapshot = publish(tmp_path, "base", version(0, keys), forms=form, watermark=0)
    reader = Reader(tmp_path)
    wrong, seen = [], set()
    done = threading.Event()

    def read():
        while not done.is_set():
            # Keys far apart, so that they are looked up in several chunks.
            found = reader.lookup_many({"a": np.tile(keys, 200), "b": keys})
            versions = {*np.unique(found["a"]), *np.unique(found["b"])}
            seen.update(versions)
            if len(versions) != 1:
                wrong.append(versions)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 60):
            if number % 20 == 0:
                snapshot = publish(
                    tmp_path, "base", version(number, keys), forms=form, watermark=number
                )
            else:
                snapshot = publish(
                    tmp_path,
                    "delta",
                    version(number, keys),
                    forms=form,
                    parent=snapshot.manifest.id,
                    since=number - 1,
                    watermark=number,
                )
            assert reader.follow() == 1
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(seen) > 3


def test_levels_stay_few():
    """2000 deltas give few levels, each at least GROWTH times as large as the next."""
    rng = np.random.default_rng(3)
    levels, model, copied = (), {}, 0
    for number in range(2000):
        keys = rng.choice(5000, 10, replace=False)
        live, deleted = keys[:7], keys[7:]
        fresh = Overlay.of(live, np.full((7, 1), number, np.float32), deleted)
        merged = push(levels, fresh, lambda keys: keys % 2 == 0)
        copied += sum(len(level.keys) for level in merged if level not in levels)
        levels = merged
        model.update(dict.fromkeys(live.tolist(), number))
        model.update(dict.fromkeys(deleted.tolist()))
        sizes = [len(level.keys) for level in levels]
        assert all(a >= GROWTH * b for a, b in itertools.pairwise(sizes))
    assert len(levels) <= 6
    assert copied < 20 * 20000
    held = {}
    for level in levels:
        held.update(zip(level.live.tolist(), level.rows[:, 0].tolist(), strict=True))
        held.update(dict.fromkeys(level.deleted.tolist()))
    assert {k: v for k, v in held.items() if v is not None} == {
        k: v for k, v in model.items() if v is not None
    }
    # The largest level keeps no deletions of keys that are not in the base.
    assert all(
        level.deleted.size == 0 or level is not levels[0] or not (level.deleted % 2).any()
        for level in levels
    )


KEYS = st.integers(0, 12) | st.integers(-(2**31), 2**31 - 1)


CHANGES = st.tuples(st.dictionaries(KEYS, st.integers(0, 255), max_size=8), st.sets(KEYS))


@dataclasses.dataclass
class Model:
    """The expected content of a chain: for each table, the number of the row of each key."""

    tables: dict[str, dict[int, int]]
    snapshot: object = None
    watermark: int = 0


@st.composite
def steps(draw):
    """Bases and deltas of both tables, and when to follow."""
    kinds = draw(st.lists(st.sampled_from(["delta"] * 5 + ["base"]), min_size=1, max_size=10))
    return [
        (kind, {name: draw(CHANGES) for name in ("plain", "half")}, draw(st.booleans()))
        for kind in ["base", *kinds]
    ]


@settings(max_examples=40)
@given(steps=steps(), ranks=st.integers(1, 2))
def test_random_sequences_of_snapshots(tmp_path_factory, steps, ranks):
    path = tmp_path_factory.mktemp("chain")
    model: dict[str, dict[int, int]] = {"plain": {}, "half": {}}
    everything = {name: set() for name in model}
    reader, parent, pending = None, None, 0
    for watermark, (kind, changes, follow) in enumerate(steps, 1):
        contents = {}
        for name, (updates, deleted) in changes.items():
            if kind == "base":
                model[name] = {}
            model[name].update(updates)
            gone = set() if kind == "base" else deleted - set(updates)
            for key in gone:
                model[name].pop(key, None)
            everything[name] |= set(updates) | deleted
            held = {key: row(FORMS[name], number) for key, number in updates.items()}
            contents[name] = Change(held, gone)
        times = {"watermark": watermark}
        if kind == "delta":
            times |= {"parent": parent.manifest.id, "since": watermark - 1}
        parent = publish(path, kind, contents, forms=FORMS, ranks=ranks, **times)
        pending = 1 if kind == "base" else pending + 1
        if reader is None:
            reader = Reader(path)
            assert reader.tables == ("plain", "half")
        elif follow:
            assert reader.follow() == pending
        else:
            continue
        pending = 0
        for name, form in FORMS.items():
            if name in model:
                _check(reader, name, form, model[name], sorted(everything[name]))


def _check(reader, name, form, model, keys):
    def vector(key):
        if key not in model:
            return np.full(form.dimension, -5, np.float32)
        return WIDEN[form.dtype](row(form, model[key]).vector)

    expected = np.array([vector(key) for key in keys], np.float32).reshape(-1, form.dimension)
    assert reader.lookup(keys, name, default=-5).tobytes() == expected.tobytes()
    assert reader.contains(keys, name).tolist() == [key in model for key in keys]
    assert reader.size(name) == len(model)
    found = {}
    for part, vectors in reader.items(name, chunk=3):
        assert 0 < len(part) <= 3
        for key, bits in zip(part.tolist(), vectors, strict=True):
            assert key not in found
            found[key] = bits.tobytes()
    assert found == {key: vector(key).tobytes() for key in model}
