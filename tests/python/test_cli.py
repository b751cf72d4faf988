"""The commands on dumps: their output, files and exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from chain_writer import Change, Form, Row, publish
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_dynemb import cli
from tf_dynemb.cli import rows as cli_rows
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain

FORMS = {
    "user": Form(2, "int64", "float32", state_width=2),
    "item/ü": Form(3, "uint64", "bfloat16"),
}


def row(form: Form, number: int, tick: int) -> Row:
    bits = np.full(form.dimension, number, np.float32)
    if form.dtype == "bfloat16":
        bits = (bits.view(np.uint32) >> 16).astype(np.uint16)
    return Row(bits, (number + 0.5,) * form.state_width, tick, tick + number % 3)


def change(name: str, numbers: dict[int, int], deleted=(), tick: int = 100) -> Change:
    return Change({key: row(FORMS[name], n, tick) for key, n in numbers.items()}, deleted)


def changes(numbers: dict[int, int], deleted=(), tick: int = 100) -> dict[str, Change]:
    return {name: change(name, numbers, deleted, tick) for name in FORMS}


def write_chain(path, ranks: int = 1):
    """A base and two deltas, after which each table has 1 -> 1, 2 -> 20, 4 -> 40, 5 -> 50."""
    first = publish(
        path,
        "base",
        changes({1: 1, 2: 2, 3: 3, 6: 6}),
        forms=FORMS,
        ranks=ranks,
        base_tick=90,
        watermark=100,
    )
    second = publish(
        path,
        "delta",
        changes({2: 9, 4: 40}, deleted=[3, 77], tick=150),
        forms=FORMS,
        ranks=ranks,
        base_tick=140,
        parent=first.manifest.id,
        since=100,
        watermark=200,
    )
    third = publish(
        path,
        "delta",
        changes({2: 20, 5: 50}, deleted=[6], tick=250),
        forms=FORMS,
        ranks=ranks,
        base_tick=240,
        parent=second.manifest.id,
        since=200,
        watermark=300,
        optimizer={"name": "Adagrad", "config": {}, "iterations": 7, "variables": {}},
    )
    return [first, second, third]


NUMBERS = {1: 1, 2: 20, 4: 40, 5: 50}


@pytest.fixture
def path(tmp_path):
    write_chain(tmp_path / "chain")
    return tmp_path / "chain"


def run(capsys, *arguments) -> tuple[int, str]:
    """Returns the exit code and stdout of a command that writes nothing to stderr."""
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def fails(capsys, code: int, *arguments) -> str:
    """Returns the one line that a failing command writes."""
    assert cli.main([str(argument) for argument in arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def state_of(path, name: str) -> dict[int, tuple]:
    """Returns, for each key, the bits of vector and state, and both times in ticks."""
    table = cli_rows.TableRows(Chain.open(path), name)
    result = {}
    columns = ["vectors", "updates", "accesses"] + ["state"] * bool(FORMS[name].state_width)
    for piece in table.pieces():
        values = {column: piece.column(column) for column in columns}
        tick = piece.source.shard.base_tick
        for i, key in enumerate(piece.keys.tolist()):
            assert key not in result
            result[key] = (
                values["vectors"][i].tobytes(),
                values["state"][i].tobytes() if "state" in values else b"",
                tick + int(values["updates"][i]),
                tick + int(values["accesses"][i]),
            )
    return result


def test_inspect(capsys, path):
    code, out = run(capsys, "inspect", path)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["kind", "id", "since", "watermark", "time", "bytes"]
    base = lines[1].split()
    assert (base[0], base[2:5]) == ("base", ["0", "100", "2023-11-14T22:13:20Z"])
    assert [line.split()[0] for line in lines[2:4]] == ["delta", "delta"]
    assert lines[7].split() == ["user", "4", "0", "2", "int64", "float32", "adagrad", "2", "1"]
    assert lines[13].split() == ["item/ü", "2", "2", "3", "uint64", "bfloat16", "none", "1"]
    heads = [line for line in lines if line.startswith("name")]
    assert len(heads) == 3


def test_inspect_json(capsys, path):
    code, out = run(capsys, "inspect", path, "--json")
    assert code == 0
    base, second, third = json.loads(out)["snapshots"]
    assert (base["kind"], base["parent"], base["watermark"]) == ("base", None, 100)
    assert second["parent"] == base["id"]
    assert third["optimizer"]["iterations"] == 7
    user, item = second["tables"]
    assert (user["rows"], user["deleted"], user["dim"]) == (2, 2, 2)
    assert user["state"] == {"optimizer": "adagrad", "widths": [2]}
    assert (item["name"], item["dtype"], item["state"]) == ("item/ü", "bfloat16", None)
    assert third["bytes"] == sum(t["bytes"] for t in third["tables"])
    files = Chain.open(path).last.directory.glob("*.npy")
    assert third["bytes"] == sum(file.stat().st_size for file in files)


def test_verify_of_a_sound_chain(capsys, path, tmp_path):
    assert run(capsys, "verify", path) == (0, "snapshots: 3, problems: 0\n")
    assert json.loads(run(capsys, "verify", path, "--json")[1]) == {"problems": []}
    write_chain(tmp_path / "sharded", ranks=3)
    assert run(capsys, "verify", tmp_path / "sharded")[0] == 0
    assert run(capsys, "verify", Chain.open(path).last.directory)[0] == 0


def damage(file, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("number", [0, 2])
def test_verify_names_file_and_offset(capsys, path, number):
    snapshot = Chain.open(path).snapshots[number]
    file = snapshot.directory / "000.r0.vectors.npy"
    damage(file, 130)
    other = snapshot.directory / "001.r0.keys.npy"
    other.write_bytes(other.read_bytes()[:-1])
    third = snapshot.directory / "001.r0.vectors.npy"
    third.unlink()
    code, out = run(capsys, "verify", path)
    assert code == 1
    lines = out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{file} at byte offset 0: the CRC32C")
    assert lines[1].startswith(f"{other} at byte offset {other.stat().st_size}: ")
    assert lines[2] == f"{third}: the file is missing"
    code, out = run(capsys, "verify", path, "--json")
    assert code == 1
    problems = json.loads(out)["problems"]
    assert [p["file"] for p in problems] == [str(file), str(other), str(third)]
    assert problems[0]["offset"] == 0


def test_verify_names_the_block(capsys, tmp_path):
    held = {key: Row(np.zeros(3, np.float32)) for key in range(4000)}
    snapshot = publish(tmp_path, "base", {"t": Change(held)}, watermark=1)
    file = snapshot.directory / "000.r0.vectors.npy"
    for offset in (5 * 4096, 9 * 4096 + 4095):
        damage(file, offset)
    code, out = run(capsys, "verify", tmp_path)
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines()[:-1]] == [
        f"{file} at byte offset {offset}" for offset in (5 * 4096, 9 * 4096)
    ]


def test_verify_of_headers_and_manifests(capsys, path):
    first, second, _ = Chain.open(path).snapshots
    damage(first.directory / "000.r0.keys.npy", 30)
    damage(second.directory / "MANIFEST.json", 400)
    code, out = run(capsys, "verify", path)
    assert code == 1
    assert "000.r0.keys.npy at byte offset 0: the header does not match" in out
    assert f"{second.directory / 'MANIFEST.json'}: " in out
    assert "the snapshot before it cannot be read" in out


def test_verify_of_a_gap(capsys, path):
    _, second, third = Chain.open(path).snapshots
    shutil.rmtree(second.directory)
    code, out = run(capsys, "verify", path)
    assert code == 1
    assert out.splitlines()[0].startswith(f"{third.directory}: a gap")


def test_verify_of_keys(capsys, tmp_path):
    """The checksums are right: the wrong content was written with them."""

    class Twice(dict):
        """It has key 5 twice."""

        def __iter__(self):
            yield from [5, 8, 5]

    form = {"t": Form(1, "int32")}
    value = Row(np.zeros(1, np.float32))
    publish(tmp_path, "base", {"t": Change(Twice({5: value, 8: value}))}, forms=form, watermark=1)
    code, out = run(capsys, "verify", tmp_path)
    assert code == 1
    # The other position of the key: whichever the index finds.
    assert "r0.keys.npy at byte offset 1" in out
    assert "key 5 is in 000.r0.keys.npy at byte offset 1" in out
    assert len(out.splitlines()) == 2

    both = Change({5: value, 6: value}, deleted=[7, 5, 7])
    snapshot = publish(tmp_path / "d", "delta", {"t": both}, forms=form, since=1, watermark=2)
    code, out = run(capsys, "verify", tmp_path / "d")
    assert code == 1
    deleted = snapshot.directory / "000.r0.deleted.npy"
    assert f"{deleted} at byte offset 132: key 5 is in 000.r0.keys.npy at byte offset 128" in out
    assert "key 7 is in 000.r0.deleted.npy" in out
    assert len(out.splitlines()) == 3


def test_verify_of_a_key_in_two_shards(capsys, tmp_path, monkeypatch):
    value = Row(np.zeros(3, np.float32))

    class Everywhere(int):
        def __mod__(self, ranks):
            return Rank()

    class Rank(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    held = Change({Everywhere(5): value, 8: value})
    publish(tmp_path, "base", {"t": held}, ranks=2, watermark=1)
    code, out = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "000.r1.keys.npy at byte offset 128: key 5 is in 000.r0.keys.npy" in out
    assert len(out.splitlines()) == 2

    class OfRank1(int):
        def __mod__(self, ranks):
            return 1

    gone = Change({8: value, 10: value}, deleted=[Everywhere(5), OfRank1(10), 4])
    publish(tmp_path / "d", "delta", {"t": gone}, ranks=2, since=1, watermark=2)
    code, out = run(capsys, "verify", tmp_path / "d")
    assert code == 1
    assert "000.r1.deleted.npy at byte offset 128: key 5 is in 000.r0.deleted.npy" in out
    assert "000.r1.deleted.npy at byte offset 136: key 10 is in 000.r0.keys.npy" in out
    assert len(out.splitlines()) == 3


def rewrite(snapshot, column: str, change_array) -> None:
    """Changes a column, and its checksum to match."""
    from tf_dynemb.storage import manifest as manifests
    from tf_dynemb.storage.crc32c import crc32c

    file = snapshot.directory / f"000.r0.{column}.npy"
    array = np.lib.format.open_memmap(file, "r+")
    change_array(array)
    array.flush()
    text = json.loads((snapshot.directory / "MANIFEST.json").read_text())
    entry = text["tables"][0]["shards"][0]["files"][column]
    content = file.read_bytes()
    blocks = range(0, len(content), text["block_bytes"])
    entry["crc32c"] = "".join(f"{crc32c(content[b : b + text['block_bytes']]):08x}" for b in blocks)
    del text["crc32c"]
    text["crc32c"] = f"{manifests._checksum(text):08x}"
    (snapshot.directory / "MANIFEST.json").write_text(json.dumps(text))


def test_verify_of_the_index(capsys, tmp_path):
    value = Row(np.zeros(3, np.float32))
    snapshot = publish(tmp_path, "base", {"t": Change({5: value, 8: value})}, watermark=1)

    def empty(index):
        index[index == 2] = 0

    rewrite(snapshot, "index", empty)
    code, out = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "000.r0.index.npy: 1 entries for 2 keys" in out
    assert "000.r0.index.npy: key 8 is not found (row 1)" in out

    def outside(index):
        index[:] = 9

    rewrite(snapshot, "index", outside)
    code, out = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "index" in out


def test_errors_are_one_line(capsys, path, tmp_path):
    assert "nowhere" in fails(capsys, 2, "inspect", tmp_path / "nowhere")
    for command in ("inspect", "verify", "merge"):
        assert "snapshot" in fails(capsys, 2, command, tmp_path)
    deltas = tmp_path / "deltas"
    publish(deltas, "delta", changes({1: 1}), forms=FORMS, since=1, watermark=2)
    assert "no base" in fails(capsys, 2, "merge", deltas, tmp_path / "out")
    assert "no base" in fails(capsys, 2, "diff", path, deltas)
    assert "'x'" in fails(capsys, 2, "diff", path, path, "--table", "x")
    assert "'x'" in fails(capsys, 2, "export", path, "--table", "x", "--output", tmp_path / "f")
    damage(Chain.open(path).last.directory / "MANIFEST.json", 300)
    assert "MANIFEST" in fails(capsys, 1, "inspect", path)
    assert "MANIFEST" in fails(capsys, 1, "merge", path)
    assert "MANIFEST" in fails(capsys, 2, "diff", path, path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [[], ["frob"], ["inspect"], ["export", "x"], ["diff", "a"]])
def test_usage(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m tf_dynemb" in capsys.readouterr().err


def test_diff(capsys, path, tmp_path):
    assert run(capsys, "diff", path, path) == (0, "user: same\nitem/ü: same\n")
    merged = tmp_path / "merged"
    cli.main(["merge", str(path), str(merged)])
    capsys.readouterr()
    assert run(capsys, "diff", path, merged)[0] == 0

    last = Chain.open(merged).last
    publish(
        merged,
        "delta",
        {
            "user": Change(
                {
                    2: row(FORMS["user"], 21, 300),
                    8: row(FORMS["user"], 8, 300),
                    4: Row(np.full(2, 40, np.float32), (40.5, 41.5)),
                    5: Row(np.full(2, 50, np.float32), (50.5, 50.5)),
                },
                [1],
            )
        },
        forms=FORMS,
        parent=last.manifest.id,
        since=300,
        watermark=400,
    )
    code, out = run(capsys, "diff", path, merged)
    assert code == 1
    assert out.splitlines() == [
        "user: only in A: 1 keys: 1",
        "user: only in B: 1 keys: 8",
        "user: different vectors: 1 keys: 2",
        "user: different state: 2 keys: 4, 2",
        "item/ü: same",
    ]
    assert run(capsys, "diff", path, merged, "--table", "item/ü") == (0, "item/ü: same\n")
    code, out = run(capsys, "diff", path, merged, "--json", "--table", "user")
    assert code == 1
    table = json.loads(out)["tables"][0]
    assert json.loads(out)["same"] is False
    assert table["only_b"] == {"count": 1, "first": [8]}
    assert sorted(table["state"]["first"]) == [2, 4]


def test_diff_of_forms_and_bits(capsys, tmp_path):
    def base(name, changes, **more):
        return publish(tmp_path / name, "base", changes, watermark=1, **more).directory

    def one(*vector):
        return {"t": Change({1: Row(np.array(vector, np.float32))})}

    nan, zero, minus = (base(str(v), one(v, 0, 0)) for v in (np.nan, 0.0, -0.0))
    assert run(capsys, "diff", nan, nan)[0] == 0
    assert run(capsys, "diff", zero, minus)[0] == 1
    wide = base("wide", one(1, 2, 3, 4), forms={"t": Form(4)})
    code, out = run(capsys, "diff", zero, wide)
    assert code == 1
    assert "dimension=4" in out
    other = base("other", {"s": Change({})})
    assert run(capsys, "diff", zero, other) == (1, "t: only in A\ns: only in B\n")


def test_diff_names_the_first_few(capsys, tmp_path):
    held = {key: Row(np.zeros(3, np.float32)) for key in range(100)}
    a = publish(tmp_path / "a", "base", {"t": Change(held)}, watermark=1).directory
    b = publish(tmp_path / "b", "base", {"t": Change({})}, watermark=1).directory
    code, out = run(capsys, "diff", a, b)
    assert code == 1
    assert out == "t: only in A: 100 keys: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...\n"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("in_place", [False, True])
def test_merge(capsys, tmp_path, ranks, in_place):
    path = tmp_path / "chain"
    third = write_chain(path, ranks)[2]
    before = {name: state_of(path, name) for name in FORMS}
    assert {key: bits[2] for key, bits in before["user"].items()} == {
        1: 100,
        2: 250,
        4: 150,
        5: 250,
    }
    reader = Reader(path)
    out = path if in_place else tmp_path / "out"
    code, printed = run(capsys, "merge", path, *([] if in_place else [out]))
    assert code == 0
    merged = Chain.open(out)
    assert printed == f"{merged.base.directory}\n"
    assert merged.deltas == []
    assert {name: state_of(out, name) for name in FORMS} == before
    manifest, last = merged.base.manifest, third.manifest
    assert manifest.id != last.id
    assert (manifest.watermark, manifest.watermark_utc_ns) == (300, last.watermark_utc_ns)
    assert manifest.continues == (last.id,)
    assert manifest.optimizer == last.optimizer
    assert manifest.world_size == ranks
    assert [len(table.shards) for table in manifest.tables] == [ranks, ranks]
    for entry, was in zip(manifest.tables, last.tables, strict=True):
        assert (entry.state, entry.initializer, entry.seed) == (
            was.state,
            was.initializer,
            was.seed,
        )
    assert run(capsys, "verify", out)[0] == 0
    if in_place:
        assert len([d for d in path.iterdir() if d.is_dir()]) == 1
        assert run(capsys, "merge", path)[0] == 0
        assert Chain.open(path).base.manifest.id == manifest.id
        assert reader.follow() == 1
    else:
        assert len(Chain.open(path).deltas) == 2
        assert "holds snapshots" in fails(capsys, 2, "merge", path, out)
        assert run(capsys, "verify", path)[0] == 0


@pytest.mark.parametrize("parent_is_merged", [False, True])
def test_a_delta_of_before_the_merge_continues_it(capsys, path, tmp_path, parent_is_merged):
    last = Chain.open(path).last.manifest.id
    out, copy, deltas = tmp_path / "out", tmp_path / "copy", tmp_path / "deltas"
    run(capsys, "merge", path, out)
    run(capsys, "merge", out, copy)  # merging only a base gives the same
    merged = Chain.open(out).base.manifest.id
    readers = [Reader(out), Reader(copy)]
    for where in (out, copy, deltas):
        publish(
            where,
            "delta",
            changes({1: 99}, deleted=[2], tick=350),
            forms=FORMS,
            parent=merged if parent_is_merged else last,
            since=300,
            watermark=400,
        )
    assert readers[0].follow(deltas) == 1
    assert readers[1].follow() == 1
    for reader in (*readers, Reader(out), Reader(copy)):
        assert reader.watermark == 400
        assert reader.lookup([1, 2, 4], "user", default=-1)[:, 0].tolist() == [99, -1, 40]
    for where in (out, copy):
        assert len(Chain.open(where).deltas) == 1
        assert run(capsys, "verify", where)[0] == 0


def test_a_delta_of_an_older_one_does_not_continue_a_merge(capsys, path, tmp_path):
    second = Chain.open(path).deltas[0].manifest.id
    run(capsys, "merge", path, tmp_path / "out")
    with pytest.raises(ValueError, match="gap"):
        publish(
            tmp_path / "out", "delta", changes({}), forms=FORMS, parent=second, since=0, watermark=9
        )


def test_merge_reads_no_damage_into_a_sound_file(capsys, path, tmp_path):
    damage(Chain.open(path).base.directory / "000.r0.state.npy", 140)
    assert "state" in fails(capsys, 1, "merge", path)
    assert len(Chain.open(path).deltas) == 2
    assert "state" in fails(capsys, 1, "merge", path, tmp_path / "out")


def test_merge_refuses_times_that_do_not_fit(capsys, tmp_path):
    value = Row(np.zeros(3, np.float32), update=5, access=5)
    late = Row(np.zeros(3, np.float32), update=2**32 + 5, access=2**32 + 5)
    base = publish(tmp_path, "base", {"t": Change({1: value})}, watermark=5)
    publish(
        tmp_path,
        "delta",
        {"t": Change({2: late})},
        base_tick=2**32,
        parent=base.manifest.id,
        since=5,
        watermark=2**33,
    )
    assert "ticks" in fails(capsys, 2, "merge", tmp_path)
    assert len(Chain.open(tmp_path).deltas) == 1


KEYS = st.integers(0, 9)
STEPS = st.lists(
    st.tuples(st.dictionaries(KEYS, st.integers(0, 200)), st.sets(KEYS), st.integers(1, 3)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_merge_of_anything(tmp_path_factory, steps):
    """Snapshots written by different numbers of ranks: a key may move between shards."""
    path = tmp_path_factory.mktemp("chain")
    model, parent = {}, None
    for number, (updates, deleted, ranks) in enumerate(steps):
        tick = 10 * number + 1
        gone = deleted - set(updates) if parent else set()
        for key in gone:
            model.pop(key, None)
        held = {key: row(FORMS["user"], value, tick) for key, value in updates.items()}
        model.update(held)
        times = {"watermark": tick + 5}
        if parent:
            times |= {"parent": parent.manifest.id, "since": tick - 5}
        parent = publish(
            path,
            "delta" if parent else "base",
            {"user": Change(held, gone)},
            forms=FORMS,
            ranks=ranks,
            base_tick=tick,
            **times,
        )
    expected = {
        key: (r.vector.tobytes(), np.float32(r.state).tobytes(), r.update, r.access)
        for key, r in model.items()
    }
    assert state_of(path, "user") == expected
    assert cli.main(["merge", str(path), str(path / "out")]) == 0
    assert cli.main(["verify", str(path / "out")]) == 0
    assert state_of(path / "out", "user") == expected
    assert cli.main(["diff", str(path), str(path / "out")]) == 0


def test_pieces_of_large_tables(capsys, tmp_path, monkeypatch):
    """More rows than one iteration handles, in merge, diff and export."""
    monkeypatch.setattr(cli_rows, "CHUNK", 7)
    held = {key: Row(np.full(3, key, np.float32), update=key) for key in range(100)}
    base = publish(tmp_path / "a", "base", {"t": Change(held)}, ranks=2, watermark=200)
    update = {key: Row(np.full(3, -key, np.float32), update=key) for key in range(50, 120)}
    publish(
        tmp_path / "a",
        "delta",
        {"t": Change(update, range(10))},
        ranks=3,
        parent=base.manifest.id,
        since=200,
        watermark=300,
    )
    assert run(capsys, "merge", tmp_path / "a", tmp_path / "b")[0] == 0
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b")[0] == 0
    reader = Reader(tmp_path / "b")
    keys = np.arange(130)
    expected = np.select([keys < 10, keys < 50, keys < 120], [-1, keys, -keys], -1)
    assert reader.lookup(keys, default=-1)[:, 2].tolist() == expected.tolist()


def test_export_npz(capsys, path, tmp_path):
    file = tmp_path / "vectors.npz"
    code, out = run(capsys, "export", path, "--output", file)
    assert (code, out) == (0, "user: 4 keys\nitem/ü: 4 keys\n")
    with np.load(file) as arrays:
        assert set(arrays) == {f"{name}/{what}" for name in FORMS for what in ("keys", "vectors")}
        for name, form in FORMS.items():
            keys, vectors = arrays[f"{name}/keys"], arrays[f"{name}/vectors"]
            assert keys.dtype == form.key_type
            assert vectors.dtype == np.float32
            assert vectors.shape == (4, form.dimension)
            assert dict(zip(keys.tolist(), vectors[:, -1].tolist(), strict=True)) == NUMBERS
    run(capsys, "export", path, "--output", file, "--table", "user")
    with np.load(file) as arrays:
        assert set(arrays) == {"user/keys", "user/vectors"}
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == [file.name]


def test_export_parquet(capsys, path, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "vectors.parquet"
    assert "--table" in fails(capsys, 2, "export", path, "--output", file)
    for name, form in FORMS.items():
        assert run(capsys, "export", path, "--output", file, "--table", name)[0] == 0
        table = parquet.read_table(file)
        assert table.column_names == ["key", "vector"]
        assert str(table.schema.field("key").type) == form.key_type
        vector_type = table.schema.field("vector").type
        assert pyarrow.types.is_fixed_size_list(vector_type)
        assert (vector_type.list_size, str(vector_type.value_type)) == (form.dimension, "float")
        rows = table.to_pylist()
        assert {r["key"]: r["vector"] for r in rows} == {
            key: [number] * form.dimension for key, number in NUMBERS.items()
        }


def test_export_parquet_without_pyarrow(capsys, path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    arguments = ["--table", "user", "--format", "parquet", "--output", tmp_path / "f"]
    assert "needs pyarrow" in fails(capsys, 2, "export", path, *arguments)
    assert not (tmp_path / "f").exists()


def test_as_a_module(path):
    """In a separate process: no TensorFlow, no traceback, and a reader that closes the pipe."""
    code = (
        "import sys, runpy; sys.modules['tensorflow'] = None; sys.modules['keras'] = None;"
        "sys.argv[0] = 'tf_dynemb'; runpy.run_module('tf_dynemb', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "snapshots: 3, problems: 0\n"), done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "tf_dynemb", "inspect", str(path / "nothing")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
