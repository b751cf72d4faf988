"""Reader: lookups in chains of snapshots, following them, and errors."""

from __future__ import annotations

import datetime
import shutil

import numpy as np
import pytest
from chain_writer import Change, Form, Row, publish
from serving_helpers import FORMS, WIDEN, delta, first_column, plain, rows

from tf_dynemb.serving import Reader
from tf_dynemb.storage import DataLossError, snapshot


@pytest.fixture
def base(tmp_path):
    """Publishes rows 0, 1, 2 with keys 1, 2, 3 at tick 10."""
    return publish(tmp_path / "chain", "base", plain([1, 2, 3]), watermark=10)


@pytest.fixture
def path(base):
    return base.directory.parent


def test_lookup(path):
    reader = Reader(path)
    vectors = reader.lookup([[1, 9], [3, 2]], default=0)
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[[0, 0.25, 0.5], [0, 0, 0]], [[2, 2.25, 2.5], [1, 1.25, 1.5]]]
    assert reader.lookup(3).tolist() == [2, 2.25, 2.5]
    assert reader.lookup([]).shape == (0, 3)
    assert reader.lookup(np.zeros((2, 0, 4), np.int8)).shape == (2, 0, 4, 3)
    assert reader.lookup([9], default=7).tolist() == [[7, 7, 7]]
    assert reader.lookup([9, 1], default=[1, 2, 3]).tolist() == [[1, 2, 3], [0, 0.25, 0.5]]
    assert reader.contains([[1, 9], [3, 2]]).tolist() == [[True, False], [True, True]]


def test_properties(base, path):
    reader = Reader(path)
    assert reader.tables == ("plain",)
    assert (reader.dimension("plain"), reader.size("plain")) == (3, 3)
    assert reader.id == base.manifest.id
    assert reader.watermark == 10
    assert reader.watermark_utc == datetime.datetime(
        2023, 11, 14, 22, 13, 20, tzinfo=datetime.timezone.utc
    )


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_types_and_shards(tmp_path, name, ranks):
    form = FORMS[name]
    limits = np.iinfo(form.key_type)
    keys = [*{limits.min, limits.max, 0, 1, 5, 6, 7}]
    held = rows(keys, 1, form)
    publish(tmp_path, "base", {name: Change(held)}, forms=FORMS, ranks=ranks, watermark=1)
    reader = Reader(tmp_path)
    expected = np.array([WIDEN[form.dtype](held[key].vector) for key in keys])
    assert reader.lookup(keys).tobytes() == expected.astype(np.float32).tobytes()
    assert reader.contains([*keys, 2, 3]).tolist() == [True] * len(keys) + [False] * 2
    assert sum(len(part) for part, _ in reader.items(chunk=2)) == reader.size() == len(keys)


@pytest.mark.parametrize("size", [1000, 100_000])
def test_many_keys(tmp_path, size):
    rng = np.random.default_rng(size)
    keys = rng.choice(10 * size, size, replace=False)
    held = {int(key): Row(np.full(3, key, np.float32)) for key in keys[: size // 2]}
    publish(tmp_path, "base", {"plain": Change(held)}, ranks=2, watermark=1)
    reader = Reader(tmp_path)
    found = reader.lookup(keys, default=-1)[:, 1]
    np.testing.assert_array_equal(found, np.where(np.arange(size) < size // 2, keys, -1))


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ([1.0], TypeError),
        (["1"], TypeError),
        ([True], TypeError),
        ([[1], [1, 2]], TypeError),
        (np.array([1.0], np.float32), TypeError),
        (np.array([1], "datetime64[s]"), TypeError),
        (np.array([2**63], np.uint64), OverflowError),
        ([2**63], OverflowError),
        ([2**64], OverflowError),
        ([-(2**63) - 1], OverflowError),
        ([1, 2**63], OverflowError),
    ],
)
def test_invalid_keys(path, keys, error):
    with pytest.raises(error, match="plain"):
        Reader(path).lookup(keys)


@pytest.mark.parametrize(
    ("key_type", "keys"),
    [
        ("int32", np.array([2**31], np.int64)),
        ("int32", np.array([-(2**31) - 1], np.int64)),
        ("int32", np.array([2**32 + 1], np.uint64)),
        ("uint64", np.array([-1], np.int8)),
        ("uint64", [-1]),
        ("int64", np.array([2**63 + 1], np.uint64)),
    ],
)
def test_keys_are_never_wrapped(tmp_path, key_type, keys):
    form = {"plain": Form(3, key_type)}
    publish(tmp_path, "base", plain([1]), forms=form, watermark=1)
    reader = Reader(tmp_path)
    with pytest.raises(OverflowError, match=str(int(np.asarray(keys)[0]))):
        reader.lookup(keys)
    with pytest.raises(OverflowError):
        reader.contains(keys)


def test_keys_of_any_integer_type(path):
    reader = Reader(path)
    for dtype in "bBhHiIlLqQ":
        assert first_column(reader, np.array([3, 1], dtype)) == [2, 0]
    assert first_column(reader, np.array([3, 1], ">i8")) == [2, 0]
    assert first_column(reader, np.array([3, 1], object)) == [2, 0]
    assert first_column(reader, np.array([1, 3, 2, 9, 1])[::-2]) == [0, 1, 0]


def test_unknown_table(path):
    reader = Reader(path)
    for call in (reader.lookup, reader.contains):
        with pytest.raises(KeyError, match=r"'items'.*'plain'"):
            call([1], table="items")
    with pytest.raises(KeyError, match="'items'"):
        reader.lookup_many({"items": [1]})
    with pytest.raises(KeyError, match="'items'"):
        reader.items("items")
    with pytest.raises(ValueError, match=r"'items'.*'plain'"):
        Reader(path, tables=["items"])


def test_several_tables_need_a_name(tmp_path):
    changes = {name: Change(rows([1], 5, form)) for name, form in FORMS.items()}
    first = publish(tmp_path, "base", changes, forms=FORMS, watermark=1)
    reader = Reader(tmp_path)
    with pytest.raises(ValueError, match="'half'"):
        reader.lookup([1])
    found = reader.lookup_many({"half": [[1, 2]], "brain": [1]}, default=3)
    assert found["half"].tolist() == [[[5, 5.25], [3, 3]]]
    assert found["brain"].tolist() == [[5]]

    half_reader = Reader(tmp_path, tables=["half"])
    assert half_reader.tables == ("half",)
    changes["plain"] = Change(rows([1], 8))
    delta(tmp_path, changes, first, 1, 2)
    assert half_reader.follow() == reader.follow() == 1
    assert half_reader.lookup([1]).tolist() == [[5, 5.25]]
    with pytest.raises(KeyError, match=r"'plain'.*'half'"):
        half_reader.lookup([1], "plain")
    assert reader.lookup([1], "plain")[0, 0] == 8


def test_wrong_default(path):
    with pytest.raises(ValueError, match=r"\[3\].*\[2\]"):
        Reader(path).lookup([1], default=[1, 2])


def test_path_without_a_base(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Reader(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no snapshot"):
        Reader(tmp_path)
    delta(tmp_path, plain([1]), None, 0, 1)
    with pytest.raises(FileNotFoundError, match="delta"):
        Reader(tmp_path)


def test_deltas(base, path):
    reader = Reader(path)
    assert reader.follow() == 0
    first = delta(path, plain([2, 4], 20, deleted=[1]), base, 10, 20)
    assert first_column(reader, [1, 2, 3, 4]) == [0, 1, 2, -1]
    assert reader.follow() == 1
    assert first_column(reader, [1, 2, 3, 4]) == [-1, 20, 2, 21]
    assert (reader.size(), reader.watermark, reader.id) == (3, 20, first.manifest.id)

    second = delta(path, plain([1], 30, deleted=[2, 4, 77]), first, 20, 30)
    delta(path, plain([4], 40), second, 30, 40)
    assert reader.follow() == 2
    for same in (reader, Reader(path)):
        assert first_column(same, [1, 2, 3, 4, 77]) == [30, -1, 2, 40, -1]
        assert same.size() == 3
        items = [pair for keys, vectors in same.items() for pair in zip(keys, vectors, strict=True)]
        assert {int(key): vector[0] for key, vector in items} == {1: 30, 3: 2, 4: 40}
        assert len(items) == 3
    assert reader.follow() == 0


def test_snapshot_directory_is_a_chain_of_one(base, path):
    first = delta(path, plain([4], 20), base, 10, 20)
    reader = Reader(base.directory)
    assert first_column(reader, [4]) == [-1]
    assert reader.follow() == 0
    assert reader.follow(first.directory) == 1
    assert reader.follow(path) == 0
    assert first_column(reader, [4]) == [20]
    renamed = path.parent / "renamed"
    shutil.copytree(first.directory, renamed)
    assert reader.follow(renamed) == 0


def test_deltas_from_another_directory(base, path):
    reader = Reader(path)
    elsewhere = path.parent / "deltas"
    first = delta(elsewhere, plain([4], 20), base, 10, 20)
    delta(elsewhere, plain([5], 30), first, 20, 30)
    assert reader.follow(elsewhere) == 2
    assert first_column(reader, [4, 5]) == [20, 30]
    # The chain's own deltas contain nothing new.
    delta(path, plain([4], 99), base, 10, 25)
    assert reader.follow() == 0
    assert first_column(reader, [4, 5]) == [20, 30]


def test_delta_without_a_parent_is_applied_if_there_is_no_gap(base, path):
    reader = Reader(path)
    delta(path.parent / "a", plain([4], 20), None, 10, 20)
    delta(path.parent / "b", plain([5], 30), None, 15, 30)
    delta(path.parent / "c", plain([6], 30), None, 31, 40)
    assert reader.follow(path.parent / "a") == 1
    assert reader.follow(path.parent / "b") == 1
    with pytest.raises(DataLossError, match=r"gap before .*/c/"):
        reader.follow(path.parent / "c")
    assert first_column(reader, [4, 5, 6]) == [20, 30, -1]


def test_empty_delta(base, path):
    reader = Reader(path)
    idle = delta(path, plain([]), base, 10, 10)
    delta(path, plain([4], 20), idle, 10, 20)
    assert reader.follow() == 1
    assert first_column(reader, [4]) == [20]


def test_new_base_replaces_all_rows(base, path):
    reader = Reader(path)
    delta(path, plain([4], 20), base, 10, 20)
    reader.follow()
    old = reader.items()
    new = publish(path, "base", plain([1, 5], 50), watermark=30)
    delta(path, plain([6], 60), new, 30, 40)
    assert reader.follow() == 2
    assert first_column(reader, [1, 2, 3, 4, 5, 6]) == [50, -1, -1, -1, 51, 60]
    assert reader.size() == 3
    # An iteration that began earlier continues in the previous state, whose files are deleted.
    assert sorted(int(key) for keys, _ in old for key in keys) == [1, 2, 3, 4]


def test_gap_keeps_the_state(base, path):
    reader = Reader(path)
    first = delta(path, plain([1], 20), base, 10, 20)
    second = delta(path, plain([2], 30), first, 20, 30)
    third = delta(path, plain([3], 40), second, 30, 40)
    hidden = path.parent / second.directory.name
    second.directory.rename(hidden)
    for _ in range(2):
        with pytest.raises(DataLossError, match=f"gap before .*{third.directory.name}"):
            reader.follow()
        assert first_column(reader, [1, 2, 3]) == [20, 1, 2]
        assert (reader.watermark, reader.size()) == (20, 3)
    # One that is opened now has that state, too, and says so.
    with pytest.warns(UserWarning, match="is read as of its snapshot .* a gap before") as said:
        late = Reader(path)
    assert said[0].filename == __file__
    with pytest.raises(DataLossError, match="gap"):
        late.follow()
    assert first_column(late, [1, 2, 3]) == [20, 1, 2]
    hidden.rename(second.directory)
    for each in (reader, late):
        assert each.follow() == 2
        assert first_column(each, [1, 2, 3]) == [20, 30, 40]


def test_a_delta_that_is_being_copied(base, path):
    second = delta(path, plain([1], 20), base, 10, 20)
    keys = next(second.directory.glob("*.keys.npy"))
    whole = keys.read_bytes()
    keys.write_bytes(whole[:-4])
    with pytest.warns(UserWarning, match="is read as of its snapshot"):
        reader = Reader(path)
    assert first_column(reader, [1]) == [0]
    keys.unlink()
    with pytest.warns(UserWarning, match="is missing"):
        Reader(path)
    keys.write_bytes(whole)
    assert reader.follow() == 1
    assert first_column(reader, [1]) == [20]


def test_gap_in_time_after_a_known_parent(base, path):
    reader = Reader(path)
    delta(path, plain([1], 20), base, 11, 20)
    with pytest.raises(DataLossError, match=r"gap.*since 11.*up to 10"):
        reader.follow()
    assert reader.watermark == 10


def test_delta_of_another_chain_is_a_gap(base, path):
    reader = Reader(path)
    other = publish(path.parent / "other", "base", plain([1], 5), watermark=10)
    delta(path.parent / "deltas", plain([1], 20), other, 10, 20)
    with pytest.raises(DataLossError, match=f"gap.*{other.manifest.id}.*{base.manifest.id}"):
        reader.follow(path.parent / "deltas")
    assert (first_column(reader, [1]), reader.watermark) == ([0], 10)


def test_new_base_without_a_wanted_table_keeps_the_state(path):
    reader = Reader(path, tables=["plain"])
    publish(path, "base", {"half": Change({})}, forms=FORMS, watermark=20)
    with pytest.raises(ValueError, match=r"'plain'.*'half'"):
        reader.follow()
    assert (first_column(reader, [1]), reader.watermark) == ([0], 10)


def test_a_poll_does_not_parse_a_long_chain(base, path, monkeypatch):
    """Its work depends on what is new, not on the length of the chain."""
    last = base
    for tick in range(11, 51):
        last = delta(path, plain([tick]), last, tick - 1, tick)
    parsed = []
    whole = snapshot.Name.parse

    def parse(name):
        parsed.append(name)
        return whole(name)

    monkeypatch.setattr(snapshot.Name, "parse", staticmethod(parse))
    reader = Reader(path)
    assert len(parsed) >= 41
    parsed.clear()
    assert reader.follow() == 0
    assert len(parsed) <= 3, parsed
    delta(path, plain([99], 7), last, 50, 51)
    parsed.clear()
    assert reader.follow() == 1
    assert len(parsed) <= 8, parsed
    assert first_column(reader, [99, 50]) == [7, 0]
