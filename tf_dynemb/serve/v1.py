"""TensorFlow Serving's REST protocol, which KServe calls V1: bodies of requests and answers.

`{"instances": [...]}` has a value or an object of named values for each row, and is answered by
`{"predictions": [...]}`; `{"inputs": ...}` has the rows of all inputs, or of each by name, and is
answered by `{"outputs": ...}`. `signature_name` names another signature. Strings can be
`{"b64": "..."}`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_dynemb.serve.inputs import Array, Input, Value, collect, widened
from tf_dynemb.serve.nested import Nested


def decode(body: Any, inputs: Mapping[str, Input]) -> dict[str, Value]:
    """Returns the values of all inputs that a request has.

    Raises:
        ValueError: the body is not of the protocol, or does not fit the inputs.
    """
    if not isinstance(body, dict) or ("instances" in body) == ("inputs" in body):
        raise ValueError('a request is {"instances": [...]} or {"inputs": ...}.')
    if "inputs" in body:
        given = body["inputs"]
        if not isinstance(given, dict) or given.keys() == {"b64"}:
            given = {_only(inputs): given}
    else:
        given = _by_name(body["instances"], inputs)
    return collect(
        inputs,
        given,
        lambda tensor, data: tensor.parse(data),
        lambda each, data: each.parse(data),
    )


def encode(body: Mapping[str, Any], outputs: Mapping[str, Array]) -> dict[str, Any]:
    """Returns the answer to a request."""
    shown = {name: _shown(name, output) for name, output in outputs.items()}
    if "inputs" in body:
        return {"outputs": next(iter(shown.values())) if len(shown) == 1 else shown}
    if len(shown) == 1:
        return {"predictions": next(iter(shown.values()))}
    lists = {
        n: each.tolist() if isinstance(each, np.ndarray) else each for n, each in shown.items()
    }
    rows = zip(*lists.values(), strict=True)
    return {"predictions": [dict(zip(lists, row, strict=True)) for row in rows]}


def _by_name(instances: Any, inputs: Mapping[str, Input]) -> dict[str, Any]:
    if isinstance(instances, Nested):
        return {_only(inputs): instances}
    if not isinstance(instances, list) or not instances:
        raise ValueError('"instances" is a list with an element for each row.')
    first = instances[0]
    if not isinstance(first, dict) or first.keys() == {"b64"}:
        return {_only(inputs): instances}
    for row in instances:
        if not isinstance(row, dict) or row.keys() != first.keys():
            raise ValueError('all elements of "instances" have the same names.')
    return {name: [row[name] for row in instances] for name in first}


def _only(inputs: Mapping[str, Input]) -> str:
    if len(inputs) != 1:
        raise ValueError(f"the model has several inputs, pass them by name: {', '.join(inputs)}.")
    return next(iter(inputs))


def _shown(name: str, output: Array) -> Any:
    """Returns an output as orjson writes it."""
    if output.dtype == object:
        return _strings(output.tolist(), name.endswith("_bytes"))
    output = widened(output)
    return output if output.flags.c_contiguous else output.copy()


def _strings(data: Any, as_base64: bool) -> Any:
    if isinstance(data, list):
        return [_strings(each, as_base64) for each in data]
    if not as_base64:
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass  # what JSON cannot have
    return {"b64": base64.b64encode(data).decode()}
