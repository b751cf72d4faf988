"""A chain of snapshots, and calls of the command line, for its tests."""

from __future__ import annotations

import numpy as np
from chain_writer import Change, Form, Row, publish

from tf_dynemb import cli
from tf_dynemb.chains import rows as chain_rows
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
    """Writes a base and two deltas, after which each table has the rows of NUMBERS."""
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
    table = chain_rows.TableRows(Chain.open(path), name)
    result = {}
    columns = ["vectors", "updates", "accesses"] + ["state"] * bool(FORMS[name].state_width)
    for block in table.blocks():
        values = {column: block.column(column) for column in columns}
        tick = block.source.shard.base_tick
        for i, key in enumerate(block.keys.tolist()):
            assert key not in result
            result[key] = (
                values["vectors"][i].tobytes(),
                values["state"][i].tobytes() if "state" in values else b"",
                tick + int(values["updates"][i]),
                tick + int(values["accesses"][i]),
            )
    return result


def damage(file, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)
