"""Requests that no client would send: the server refuses them, and goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import struct
import subprocess
import sys
import urllib.parse

from serve_helpers import Server, build, export

# isort: split
import grpc
import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

ROW = {"users": [1], "tags": [1, 2]}
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    limits = ["--max-request-bytes=20000", "--timeout-seconds=2"]
    with Server(f"--model=ctr={export(build(), folder)}", *limits) as server:
        yield server


@pytest.fixture(autouse=True)
def still_right(server):
    """After each test, the server answers as before it, and has logged no failure."""
    said = len(server.lines)
    yield
    assert server.process.poll() is None
    answer = httpx.post(f"{server.url}/v1/models/ctr:predict", json={"instances": [ROW]})
    assert answer.status_code == 200
    assert [line for line in server.lines[said:] if "Traceback" in line] == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["users", "tags", "b64", "name", "data"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
MANY = hypothesis.settings(
    max_examples=150,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@MANY
@hypothesis.given(st.sampled_from(["instances", "inputs", "signature_name"]), VALUES, VALUES)
def test_bodies_of_v1(server, name, value, other):
    body = json.dumps({name: value, "instances": other} if name != "instances" else {name: value})
    answer = httpx.post(f"{server.url}/v1/models/ctr:predict", content=body)
    assert answer.status_code in (200, 400)


def tensor(**changes):
    good = {"name": "users", "shape": [1, 1], "datatype": "INT64", "data": [1]}
    return {**good, **changes}


@MANY
@hypothesis.given(
    st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), VALUES),
    st.sampled_from(["id", "parameters", "outputs"]),
    VALUES,
)
def test_bodies_of_v2(server, changes, name, value):
    body = json.dumps({"inputs": [tensor(**changes)], name: value})
    answer = httpx.post(f"{server.url}/v2/models/ctr/infer", content=body)
    assert answer.status_code == 400  # `tags` is missing, at the least


@MANY
@hypothesis.given(st.binary(max_size=200), st.integers(-5, 300), st.integers(-(2**70), 2**70))
def test_binary_tensors(server, tail, length, size):
    given = tensor(parameters={"binary_data_size": size})
    del given["data"]
    body = json.dumps({"inputs": [given]}).encode() + tail
    headers = {"inference-header-content-length": str(length)}
    answer = httpx.post(f"{server.url}/v2/models/ctr/infer", content=body, headers=headers)
    assert answer.status_code == 400


def field(number, data):
    """A field of a protobuf message: a string or a message."""
    size, length = [], len(data)
    while True:
        size.append(length & 127 | (128 if length > 127 else 0))
        length >>= 7
        if not length:
            return bytes([number << 3 | 2, *size]) + data


def message(name=b"ctr", tensors=((b"users", b"INT64", [1, 1]),), raw=(), contents=b""):
    made = field(1, name)
    for tensor_name, datatype, shape in tensors:
        dims = b"".join(bytes([3 << 3]) + varint(each) for each in shape)
        made += field(5, field(1, tensor_name) + field(2, datatype) + dims + contents)
    return made + b"".join(field(7, each) for each in raw)


def varint(number):
    number &= 2**64 - 1
    found = []
    while True:
        found.append(number & 127 | (128 if number > 127 else 0))
        number >>= 7
        if not number:
            return bytes(found)


@pytest.fixture(scope="module")
def call(server):
    with grpc.insecure_channel(server.address) as channel:
        infer = channel.unary_unary(INFER)

        def code(sent):
            try:
                infer(sent, timeout=20)
            except grpc.RpcError as error:
                return error.code().name
            return "OK"

        yield code


SHAPES = ([1, 1], [-1, 1], [2**62, 4], [0], [], [1] * 40, [2**31, 0])


@pytest.mark.parametrize("datatype", [b"INT64", b"BYTES", b"FP16", b"BOOL", b"", b"\xff", b"int64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_of_grpc(call, datatype, shape):
    tensors = [(b"users", datatype, shape)]
    eight = struct.pack("<q", 1)
    for raw in ((), (eight,), (b"",), (eight[:-1],), (eight * 3, eight), (b"\xff\xff\xff\xffab",)):
        assert call(message(tensors=tensors, raw=raw)) == "INVALID_ARGUMENT"
    contents = field(5, bytes([3 << 3]) + varint(1))
    assert call(message(tensors=tensors, raw=[eight], contents=contents)) == "INVALID_ARGUMENT"


@MANY
@hypothesis.given(st.binary(max_size=300))
def test_bytes_of_grpc(call, sent):
    assert call(sent) != "OK"


def test_changed_bytes_of_grpc(call):
    splits = struct.pack("<2q", 0, 1)
    tensors = [(b"users", b"INT64", [1, 1]), (b"tags.values", b"INT64", [1])]
    one = struct.pack("<q", 1)
    good = message(tensors=[*tensors, (b"tags.row_splits", b"INT64", [2])], raw=[one, one, splits])
    assert call(good) == "OK"
    rng = random.Random(0)
    codes = set()
    for _ in range(400):
        changed = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        codes.add(call(bytes(changed)))
    assert codes <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}


RAW = {
    "no request": b"\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 30,
    "a negative length": b"POST /v1/models/ctr:predict HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: -1\r\n\r\n",
    "two lengths": b"POST /v1/models/ctr:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    b"Content-Length: 9\r\n\r\n{}",
    "a large header": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    "a length without a body": b"POST /v1/models/ctr:predict HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: 100\r\n\r\n{",
    "half of a header": b"GET / HTTP/1.1\r\nHost: x\r\nX: ",
    "a large chunk": b"POST /v1/models/ctr:predict HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFF\r\n{",
    "an upgrade": b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
}


@pytest.mark.parametrize("case", RAW)
def test_bytes_of_http(server, case):
    url = urllib.parse.urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
        connection.sendall(RAW[case])
        try:
            answer = connection.recv(1000)
        except ConnectionError:
            answer = b""
    assert answer == b"" or b" 200 " not in answer.splitlines()[0]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/..%2f..%2fetc%2fpasswd:predict",
        "/v1/models/%00:predict",
        "/v1/models/ctr/versions/..:predict",
        "/v2/models/ctr/versions/%2e%2e/infer",
        "/v2/models/../../etc/passwd",
        "/v2/models/" + "a" * 5000 + "/infer",
        "/v2/models/ctr%20/infer",
    ],
)
def test_paths(server, path):
    answer = httpx.post(server.url + path, json={"instances": [ROW]})
    assert answer.status_code in (404, 405)


def test_the_description_of_the_server(server, tmp_path):
    """What the OpenAPI document says of answers is true of requests made from it."""
    program = [sys.executable, "-m", "schemathesis.cli"]
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    command = [*program, "run", f"{server.url}/openapi.json", f"--checks={checks}"]
    command += ["--max-examples=25", "--phases=examples,fuzzing", "--seed=1", "--no-color"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=os.environ
    )
    assert done.returncode == 0, done.stdout[-4000:]
