"""Dumps of SOK: written byte by byte according to their format, and read."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from tf_dynemb.sok import dump
from tf_dynemb.sok.dump import read_sok_dump

NUMBERS = {
    "int32": 0, "int64": 1, "uint32": 2, "uint64": 3, "float16": 4, "float32": 5, "float64": 6,
}  # fmt: skip
KEY, WEIGHT, STATE = 0, 1, 2
HEADER_BYTES = 296


def header(kind: int, dtype: str | int, table: str = "", state: str = "") -> bytes:
    number = NUMBERS[dtype] if isinstance(dtype, str) else dtype
    return b"".join(
        [
            b" " * (256 - len(table)) + table.encode(),
            bytes([0, 0, 0, kind]),
            b" " * (32 - len(state)) + state.encode(),
            bytes([number >> 24, number >> 16 & 255, number >> 8 & 255, number & 255]),
        ]
    )


def little_endian(values) -> bytes:
    values = np.asarray(values)
    return values.astype(values.dtype.newbyteorder("<")).tobytes()


def write(path: Path, kind: int, values, table: str = "", state: str = "") -> None:
    values = np.asarray(values)
    path.write_bytes(header(kind, values.dtype.name, table, state) + little_endian(values))


def extremes(dtype: str) -> np.ndarray:
    if dtype.startswith("float"):
        limits = np.finfo(dtype)
        return np.array([limits.min, limits.max, limits.tiny, -0.0, 1.5, np.inf], dtype)
    limits = np.iinfo(dtype)
    return np.array([limits.min, limits.max, 0, 1, 2, 3], dtype)


KEYS = np.array([5, -7, 2**40, 0], np.int64)
VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3) / 8


def write_table(folder: Path, name: str = "users", header_name: str = "", **states) -> None:
    """Writes a table of four vectors of dimension 3, with Adam's states if given."""
    write(folder / f"{name}-key", KEY, KEYS, header_name)
    write(folder / f"{name}-weight", WEIGHT, VECTORS, header_name)
    for state, values in states.items():
        write(folder / f"{name}-Adam-{state}", STATE, values, header_name, state)


@pytest.mark.parametrize("header_name", ["", "users", "users:0"])
def test_table_with_states(tmp_path, header_name):
    name = "users_0" if ":" in header_name else "users"
    m, v = VECTORS * 2, (VECTORS - 1).astype(np.float64)
    write_table(tmp_path, name, header_name, m=m, v=v)
    read = read_sok_dump(tmp_path)
    assert list(read) == [name]
    table = read[name]
    assert (table.name, table.optimizer) == (name, "Adam")
    for got, expected in (
        (table.keys, KEYS), (table.vectors, VECTORS), (table.states["m"], m), (table.states["v"], v)
    ):  # fmt: skip
        np.testing.assert_array_equal(got, expected)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert isinstance(got, np.memmap)
        assert not got.flags.writeable
    assert list(table.states) == ["m", "v"]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_keys_of_every_type(tmp_path, dtype):
    keys = extremes(dtype)
    write(tmp_path / "t-key", KEY, keys)
    write(tmp_path / "t-weight", WEIGHT, np.ones([6, 2], np.float32))
    table = read_sok_dump(tmp_path)["t"]
    np.testing.assert_array_equal(table.keys, keys)
    assert table.keys.dtype == keys.dtype
    assert table.vectors.shape == (6, 2)
    assert table.states == {}
    assert table.optimizer is None


@pytest.mark.parametrize("state", ["float16", "float32", "float64"])
@pytest.mark.parametrize("vector", ["float16", "float32", "float64"])
def test_vectors_and_states_of_every_type(tmp_path, vector, state):
    write(tmp_path / "t-key", KEY, np.array([9, 8], np.int64))
    write(tmp_path / "t-weight", WEIGHT, extremes(vector))
    write(tmp_path / "t-Adagrad-accumulator", STATE, extremes(state), state="accumulator")
    table = read_sok_dump(tmp_path)["t"]
    np.testing.assert_array_equal(table.vectors, extremes(vector).reshape(2, 3))
    np.testing.assert_array_equal(table.states["accumulator"], extremes(state).reshape(2, 3))
    assert (table.vectors.dtype, table.states["accumulator"].dtype) == (vector, state)
    assert table.optimizer == "Adagrad"


def test_some_tables_of_a_dump(tmp_path):
    for name in ("a", "a_b", "ab"):
        write_table(tmp_path, name, m=VECTORS + len(name))
    write(tmp_path / "ab-key", KEY, KEYS[::-1])
    (tmp_path / "meta_info").write_bytes(b"an older SOK wrote one")
    read = read_sok_dump(str(tmp_path))
    assert sorted(read) == ["a", "a_b", "ab"]
    np.testing.assert_array_equal(read["ab"].keys, KEYS[::-1])
    assert read["a"].states["m"][0, 0] == 1
    assert read["a_b"].states["m"][0, 0] == 3
    (tmp_path / "a-weight").unlink()
    assert list(read_sok_dump(tmp_path, ["ab", "a/b"])) == ["ab", "a_b"]
    assert read_sok_dump(tmp_path, iter(["ab"])).keys() == {"ab"}


def test_static_table_of_two_gpus_has_the_order_of_its_key_file(tmp_path):
    rows = np.concatenate(
        [np.arange(0, 10, 2), np.arange(1, 10, 2)]
    )  # the rows of the first GPU, then of the second
    write(tmp_path / "static-key", KEY, rows)
    write(tmp_path / "static-weight", WEIGHT, np.stack([rows, -rows], 1).astype(np.float32))
    table = read_sok_dump(tmp_path)["static"]
    np.testing.assert_array_equal(table.vectors[table.keys == 7], [[7, -7]])
    np.testing.assert_array_equal(table.keys, rows)


def test_file_name_of_a_variable():
    assert dump.file_name_of("model/user-ids:0") == "model_user_ids_0"


def replace(path: Path, begin: int, new: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[begin : begin + len(new)] = new
    path.write_bytes(whole)


# The damage to a valid dump, the file that the error names, and a fragment of the message.
FAULTS = {
    "no key file": (lambda d: (d / "users-key").unlink(), "users-key", "missing"),
    "no weight file": (lambda d: (d / "users-weight").unlink(), "users-weight", "missing"),
    "another table": (
        lambda d: replace(d / "users-weight", 251, b"movie"), "users-weight", "'movie'"),
    "another table's state": (
        lambda d: replace(d / "users-Adam-m", 251, b"movie"), "users-Adam-m", "'movie'"),
    "a name that is not text": (
        lambda d: replace(d / "users-key", 0, b"\xff\xfe"), "users-key", "header of SOK"),
    "vectors as keys": (
        lambda d: write(d / "users-key", WEIGHT, VECTORS), "users-key", "vectors"),
    "keys as vectors": (lambda d: write(d / "users-weight", KEY, KEYS), "users-weight", "keys"),
    "vectors as state": (
        lambda d: write(d / "users-Adam-m", WEIGHT, VECTORS), "users-Adam-m", "vectors"),
    "unknown kind": (lambda d: replace(d / "users-key", 259, b"\x03"), "users-key", "kind 3"),
    "little-endian kind": (
        lambda d: replace(d / "users-weight", 256, b"\x01\0\0\0"), "users-weight", "kind 16777216"),
    "another state": (
        lambda d: write(d / "users-Adam-m", STATE, VECTORS, state="v"), "users-Adam-m", "'v'"),
    "state without a name": (
        lambda d: write(d / "users-Adam-m", STATE, VECTORS), "users-Adam-m", "''"),
    "keys with a state's name": (
        lambda d: write(d / "users-key", KEY, KEYS, state="m"), "users-key", "'m'"),
    "unknown type": (lambda d: replace(d / "users-weight", 295, b"\x07"), "users-weight", "type 7"),
    "little-endian type": (
        lambda d: replace(d / "users-weight", 292, b"\5\0\0\0"), "users-weight", "type 83886080"),
    "float keys": (
        lambda d: replace(d / "users-key", 295, b"\x06"), "users-key", "float64"),
    "integer vectors": (
        lambda d: replace(d / "users-weight", 295, b"\x00"), "users-weight", "int32"),
    "integer state": (
        lambda d: replace(d / "users-Adam-m", 295, b"\x01"), "users-Adam-m", "int64"),
    "a missing vector": (
        lambda d: write(d / "users-weight", WEIGHT, VECTORS[:3]), "users-weight", "4 keys"),
    "five keys": (
        lambda d: write(d / "users-key", KEY, np.arange(5)), "users-weight", "12 values"),
    "fewer values than keys": (
        lambda d: write(d / "users-weight", WEIGHT, VECTORS[0]), "users-weight", "3 values"),
    "a missing vector of state": (
        lambda d: write(d / "users-Adam-m", STATE, VECTORS[:3], state="m"),
        "users-Adam-m", "9 values.*12"),
    "one number of state per row": (
        lambda d: write(d / "users-Adam-m", STATE, VECTORS[:, 0], state="m"),
        "users-Adam-m", "4 values.*12"),
    "two optimizers": (
        lambda d: write(d / "users-SGD-momentum", STATE, VECTORS, state="momentum"),
        "users-SGD-momentum", "Adam, SGD"),
    "no keys": (
        lambda d: write(d / "users-key", KEY, KEYS[:0]), "users-key", "no values"),
    "no vectors": (
        lambda d: write(d / "users-weight", WEIGHT, VECTORS[:0]), "users-weight", "no values"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_error_names_the_fault_and_its_file(tmp_path, fault):
    spoil, file, says = FAULTS[fault]
    write_table(tmp_path, m=VECTORS)
    read_sok_dump(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}/{file}\b.*{says}"):
        read_sok_dump(tmp_path)


def test_truncated_file_is_an_error(tmp_path):
    """Truncation is detected, unless the number of keys still divides the number of values."""
    write_table(tmp_path, m=VECTORS)
    undetectable = [("users-key", HEADER_BYTES + 8 * n) for n in (1, 2, 3)]
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            if (path.name, length) in undetectable:
                assert read_sok_dump(tmp_path)["users"].vectors.shape[1] != 3
                continue
            with pytest.raises(ValueError, match=f"{tmp_path}/users-") as error:
                read_sok_dump(tmp_path)
            assert path.name in str(error.value) or length > HEADER_BYTES
        path.write_bytes(whole)
    np.testing.assert_array_equal(read_sok_dump(tmp_path)["users"].vectors, VECTORS)


def test_missing_table_and_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} holds no dump"):
        read_sok_dump(tmp_path)
    write_table(tmp_path)
    with pytest.raises(ValueError, match="movies-key is missing"):
        read_sok_dump(tmp_path, ["users", "movies"])
    with pytest.raises(FileNotFoundError):
        read_sok_dump(tmp_path / "elsewhere")


def test_module_needs_only_numpy():
    tree = ast.parse(Path(dump.__file__).read_text(encoding="utf-8"))
    modules = {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
        )
    }
    standard = {
        "__future__", "string", "struct", "collections.abc", "dataclasses", "pathlib", "typing",
    }  # fmt: skip
    assert modules <= standard | {"numpy", "numpy.typing", "tf_dynemb._presence"}
