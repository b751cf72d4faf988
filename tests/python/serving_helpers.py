"""Chains of snapshots for tests of Reader."""

from __future__ import annotations

import numpy as np
from chain_writer import Change, Form, Row, publish

from tf_dynemb.serving import Reader

FORMS = {
    "plain": Form(3),
    "half": Form(2, "int32", "float16"),
    "brain": Form(1, "uint64", "bfloat16", state_width=2),
}


WIDEN = {
    "float32": lambda bits: bits,
    "float16": lambda bits: bits.astype(np.float32),
    "bfloat16": lambda bits: (bits.astype(np.uint32) << 16).view(np.float32),
}


def row(form: Form, number: int) -> Row:
    """Returns a row that depends on `number`; float16 rounds it, and bfloat16 truncates it."""
    vector = np.float32(number) + np.arange(form.dimension, dtype=np.float32) / 4
    if form.dtype == "bfloat16":
        bits = (vector.view(np.uint32) >> 16).astype(np.uint16)
    else:
        bits = vector.astype(form.dtype)
    return Row(bits, (0.5,) * form.state_width)


def rows(keys, number: int = 0, form: Form = FORMS["plain"]) -> dict[int, Row]:
    return {key: row(form, number + i) for i, key in enumerate(keys)}


def plain(keys, number: int = 0, deleted=()) -> dict[str, Change]:
    """Changes of the table "plain"."""
    return {"plain": Change(rows(keys, number), deleted)}


def first_column(reader: Reader, keys) -> list[float]:
    return reader.lookup(keys, "plain", default=-1.0)[:, 0].tolist()


def delta(path, changes, parent, since, watermark, **more):
    parent = getattr(parent, "manifest", None) and parent.manifest.id
    return publish(
        path, "delta", changes, parent=parent, since=since, watermark=watermark, forms=FORMS, **more
    )
