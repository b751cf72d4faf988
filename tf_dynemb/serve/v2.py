"""The Open Inference Protocol, which KServe calls V2: tensors of requests and answers."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import orjson
from kserve import InferInput, InferOutput, InferRequest, InferResponse
from kserve.protocol.infer_type import RequestedOutput
from kserve.utils.numpy_codec import from_np_dtype, to_np_dtype

from tf_dynemb.serve import nested
from tf_dynemb.serve.inputs import Array, Input, Tensor, Value, collect, widened


def parse(body: bytes, json_bytes: int, model: str) -> InferRequest:
    """Returns a request of the REST protocol; the tensors that follow its JSON are not copied.

    Args:
        body: the request.
        json_bytes: the length of its JSON.
        model: the model that it is for.

    Raises:
        ValueError: the body is not of the protocol.
    """
    given = nested.parse(body[:json_bytes])
    if not isinstance(given, dict) or not isinstance(given.get("inputs"), list):
        raise ValueError('a request is {"inputs": [...]}.')
    inputs, begin = [], json_bytes
    for each in given["inputs"]:
        made, size = _input(each)
        if size is not None:
            if size > len(body) - begin:
                raise ValueError(f"input {made.name!r}: there are fewer than {size} bytes.")
            made._raw_data = body[begin : begin + size]
            begin += size
        inputs.append(made)
    if begin != len(body):
        raise ValueError(f"the body has {len(body) - begin} bytes after the last input.")
    outputs = given.get("outputs")
    parameters = given.get("parameters")
    if not isinstance(outputs, (list, type(None))) or not isinstance(
        parameters, (dict, type(None))
    ):
        raise ValueError('"outputs" is a list, and "parameters" an object.')
    return InferRequest(
        model,
        inputs,
        request_id=given["id"] if isinstance(given.get("id"), str) else None,
        parameters=parameters,
        request_outputs=[_requested(each) for each in outputs or ()] or None,
    )


def _input(given: Any) -> tuple[InferInput, int | None]:
    """Returns an input, and the bytes of its tensor after the JSON; None: it is in the JSON."""
    if not isinstance(given, dict) or not all(
        isinstance(given.get(k), str) for k in ("name", "datatype")
    ):
        raise ValueError('an input has "name", "shape", "datatype" and "data".')
    name, shape, parameters = given["name"], given.get("shape"), given.get("parameters") or {}
    if not isinstance(shape, list) or not all(type(each) is int for each in shape):
        raise ValueError(f'input {name!r}: "shape" is a list of integers.')
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if "data" in given:
        size = None
        if not isinstance(given["data"], (list, nested.Nested)):
            raise ValueError(f'input {name!r}: "data" is a list.')
    elif type(size) is not int or size < 0:
        raise ValueError(f'input {name!r} has neither "data" nor a "binary_data_size".')
    return InferInput(name, shape, given["datatype"], given.get("data"), parameters), size


def _requested(given: Any) -> RequestedOutput:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise ValueError('an element of "outputs" has a "name".')
    parameters = given.get("parameters")
    return RequestedOutput(given["name"], parameters if isinstance(parameters, dict) else None)


def decode(request: InferRequest, inputs: Mapping[str, Input]) -> dict[str, Value]:
    """Returns the values of all inputs that a request has.

    Raises:
        ValueError: a tensor is malformed, or they do not fit the inputs.
    """
    given: dict[str, InferInput] = {}
    for each in request.inputs:
        if each.name in given:
            raise ValueError(f"input {each.name!r} is there twice.")
        given[each.name] = each
    return collect(inputs, given, lambda tensor, each: tensor.check(_array(each)))


def encode(
    request: InferRequest,
    outputs: Mapping[str, Array],
    version: str,
    parameters: Mapping[str, Any],
) -> InferResponse:
    """Returns the answer to a request.

    Raises:
        ValueError: the request asks for an output that the model does not have.
    """
    asked = request.request_outputs or [RequestedOutput(name) for name in outputs]
    default = bool(request.use_binary_outputs)
    made = []
    if len({each.name for each in asked}) < len(asked):
        raise ValueError("an output is asked for twice.")
    for each in asked:
        if each.name not in outputs:
            raise ValueError(f"there is no output {each.name!r}: {', '.join(outputs)}.")
        array = widened(outputs[each.name])
        output = InferOutput(each.name, list(array.shape), from_np_dtype(array.dtype))
        if each.binary_data if each.binary_data is not None and not request.from_grpc else default:
            output.set_data_from_numpy(array, binary_data=True)
        elif array.dtype == object:
            output.data = [_text(element, request.from_grpc) for element in array.ravel().tolist()]
        else:  # orjson writes the shortest text of a float32
            flat = np.ascontiguousarray(array).ravel()
            output.data = flat.tolist() if request.from_grpc else flat
        made.append(output)
    return InferResponse(
        request.id or "",
        request.model_name,
        made,
        model_version=version or None,
        from_grpc=request.from_grpc,
        parameters=dict(parameters),
        use_binary_outputs=default,
    )


def to_rest(response: InferResponse) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and the length of its JSON; None: it has no binary tensors."""
    outputs, tensors = [], []
    for each in response.outputs:
        shown = {"name": each.name, "datatype": each.datatype, "shape": each.shape}
        if each._raw_data is None:
            shown["data"] = each.data
        else:
            shown["parameters"] = {"binary_data_size": len(each._raw_data)}
            tensors.append(each._raw_data)
        outputs.append(shown)
    answer = {"id": response.id, "model_name": response.model_name, "outputs": outputs}
    if response.model_version:
        answer["model_version"] = response.model_version
    if response.parameters:
        answer["parameters"] = response.parameters
    text = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([text, *tensors]), len(text) if tensors else None


def described(tensor: Tensor, name: str) -> dict[str, Any]:
    """Returns a tensor as the metadata of a model has it."""
    dtype = np.dtype(np.float32) if tensor.dtype == ml_dtypes.bfloat16 else tensor.dtype
    shape = [-1 if each is None else each for each in tensor.shape or ()]
    return {"name": name, "datatype": from_np_dtype(dtype), "shape": shape}


def _text(element: bytes, from_grpc: bool) -> str | bytes:
    if from_grpc:
        return element
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise ValueError("an output is not UTF-8: ask for binary outputs.") from None


def _array(each: InferInput) -> Array:
    """Returns the tensor of an input; raises ValueError if its data do not have its shape."""
    dtype = to_np_dtype(each.datatype)
    if dtype is None:
        raise ValueError(f"input {each.name!r} has an unknown datatype {each.datatype!r}.")
    shape = list(each.shape)
    if any(not 0 <= length < 2**31 for length in shape):
        raise ValueError(f"input {each.name!r} has the shape {shape}.")
    dtype = np.dtype(dtype)
    if each._raw_data is None:
        array = _listed(each, dtype)
    elif dtype.kind == "O":
        array = _strings(each.name, each._raw_data, math.prod(shape))
    elif len(each._raw_data) % dtype.itemsize:
        raise ValueError(f"input {each.name!r}: {len(each._raw_data)} bytes of {dtype}.")
    else:
        array = np.frombuffer(each._raw_data, dtype)
    if array.size != math.prod(shape):
        raise ValueError(f"input {each.name!r} has {array.size} elements, and the shape {shape}.")
    return array.reshape(shape)


def _listed(each: InferInput, dtype: np.dtype[Any]) -> Array:
    """Returns the data of a JSON list, flat or nested, or of the typed contents of gRPC."""
    tensor = Tensor(each.name, dtype, None)
    data = each.data or []
    if dtype.kind == "b" and isinstance(data, list) and data[:1] in (["true"], ["false"]):
        data = [one == "true" for one in data]
    return tensor.parse(data)


def _strings(name: str, data: bytes, count: int) -> Array:
    found: list[bytes] = []
    begin = 0
    while begin < len(data):
        if len(found) == count:
            raise ValueError(f"input {name!r} has more strings than its shape.")
        end = begin + 4
        if end <= len(data):
            end += struct.unpack_from("<I", data, begin)[0]
        if end > len(data):
            raise ValueError(f"input {name!r}: a string ends behind the data.")
        found.append(data[begin + 4 : end])
        begin = end
    array = np.empty(len(found), object)
    array[:] = found
    return array
