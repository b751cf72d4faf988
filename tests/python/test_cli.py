"""The commands on dumps: their output, files and exit codes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from chain_writer import Change, Form, Row, publish
from cli_helpers import (
    FORMS,
    changes,
    damage,
    fails,
    row,
    run,
    write_chain,
)

from tf_dynemb import cli
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain


@pytest.fixture
def path(tmp_path):
    write_chain(tmp_path / "chain")
    return tmp_path / "chain"


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


def test_verify_of_an_undamaged_chain(capsys, path, tmp_path):
    assert run(capsys, "verify", path) == (0, "snapshots: 3, problems: 0\n")
    assert json.loads(run(capsys, "verify", path, "--json")[1]) == {"problems": []}
    write_chain(tmp_path / "sharded", ranks=3)
    assert run(capsys, "verify", tmp_path / "sharded")[0] == 0
    assert run(capsys, "verify", Chain.open(path).last.directory)[0] == 0


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


def test_verify_of_repeated_keys(capsys, tmp_path):
    """The checksums are right, because they were computed from the wrong content."""

    class Twice(dict):
        """A dict that iterates over key 5 twice."""

        def __iter__(self):
            yield from [5, 8, 5]

    form = {"t": Form(1, "int32")}
    value = Row(np.zeros(1, np.float32))
    publish(tmp_path, "base", {"t": Change(Twice({5: value, 8: value}))}, forms=form, watermark=1)
    code, out = run(capsys, "verify", tmp_path)
    assert code == 1
    # At 128 or 136: the index finds one of the two positions of the key.
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
    """Changes a column, and updates its checksum."""
    from tf_dynemb.format import manifest as manifests
    from tf_dynemb.format.crc32c import crc32c

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
    text["crc32c"] = f"{manifests.checksum_of(text):08x}"
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
    for command in (["inspect"], ["verify"], ["merge", "--in-place"]):
        assert "snapshot" in fails(capsys, 2, *command, tmp_path)
    deltas = tmp_path / "deltas"
    publish(deltas, "delta", changes({1: 1}), forms=FORMS, since=1, watermark=2)
    assert "no base" in fails(capsys, 2, "merge", deltas, tmp_path / "out")
    assert "no base" in fails(capsys, 2, "diff", path, deltas)
    assert "'x'" in fails(capsys, 2, "diff", path, path, "--table", "x")
    assert "'x'" in fails(capsys, 2, "export", path, "--table", "x", "--output", tmp_path / "f.csv")
    damage(Chain.open(path).last.directory / "MANIFEST.json", 300)
    assert "MANIFEST" in fails(capsys, 1, "inspect", path)
    assert "MANIFEST" in fails(capsys, 1, "merge", path, "--in-place")
    assert "MANIFEST" in fails(capsys, 2, "diff", path, path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [[], ["frob"], ["inspect"], ["export"], ["diff", "a"]])
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


def test_diff_names_the_first_keys(capsys, tmp_path):
    held = {key: Row(np.zeros(3, np.float32)) for key in range(100)}
    a = publish(tmp_path / "a", "base", {"t": Change(held)}, watermark=1).directory
    b = publish(tmp_path / "b", "base", {"t": Change({})}, watermark=1).directory
    code, out = run(capsys, "diff", a, b)
    assert code == 1
    assert out == "t: only in A: 100 keys: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...\n"


@pytest.mark.parametrize(
    "command", ["inspect", "verify", "merge", "rollback", "prune", "lookup", "export"]
)
def test_a_path_without_snapshots_says_what_is_there(capsys, tmp_path, command):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name, there in [
        ("nothing", "holds no snapshot: it does not exist"),
        ("file", "holds no snapshot: it is a file"),
        ("folder", "holds no snapshot; in it: nothing"),
    ]:
        arguments = {"merge": [tmp_path / "out"], "lookup": ["1"], "export": [tmp_path / "out.npz"]}
        assert there in fails(capsys, 2, command, tmp_path / name, *arguments.get(command, []))


def test_readers_of_a_saved_model_are_sent_to_its_tables(tmp_path):
    (tmp_path / "saved_model.pb").write_text("")
    with pytest.raises(FileNotFoundError, match="it is a SavedModel"):
        Reader(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit", "--", "-x", "PATH"],
        ["audit", "--json", "--", "-x", "PATH"],
        ["audit", "--json", "--", "--json", "PATH"],
        ["lookup", "PATH", "--table=user", "--integer-keys", "--", "-1"],
        ["lookup", "--table=user", "--integer-keys", "--", "PATH", "-1"],
    ],
)
def test_keys_after_two_dashes_are_not_options(capsys, path, arguments):
    code, out = run(capsys, *[path if each == "PATH" else each for each in arguments])
    assert code == 0
    assert ("-1" if arguments[0] == "lookup" else "copies") in out
