"""python -m tf_dynemb.serve: answers by both protocols, to clients that nobody here wrote."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import http.server
import importlib.util
import json
import pathlib
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
from typing import ClassVar

import certificates
import grpc
import httpx
import keras
import numpy as np
import pytest
import tensorflow as tf
from serve_helpers import TAGS, USERS, Server, build, change, export, scores

import tf_dynemb as de
from tf_dynemb.serve.__main__ import main
from tf_dynemb.serve.options import parse

if importlib.util.find_spec("kserve") is None:
    pytest.skip("needs the extra `serve`", allow_module_level=True)

ROWS = [{"users": u, "tags": t} for u, t in zip(USERS.tolist(), TAGS, strict=True)]


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    export(model, folder, "7")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with Server(f"--model=ctr={folder}/models", f"--model=plain={folder}/models/7") as server:
        yield server


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def client_of(server, **options):
    return httpx.Client(base_url=server.url, timeout=30, **options)


def v1(client, body, model="ctr", **options):
    return client.post(f"/v1/models/{model}:predict", json=body, **options)


def eventually(condition, seconds=30):
    """Waits until a condition is true; returns its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it is never true"
        time.sleep(0.02)
    return found


def v2_inputs():
    lengths = [len(each) for each in TAGS]
    arrays = {
        "users": USERS,
        "tags.values": np.array([tag for tags in TAGS for tag in tags]),
        "tags.row_splits": np.cumsum([0, *lengths]),
    }
    return {name: array.astype(np.int64) for name, array in arrays.items()}


def test_rows_and_columns(client, model):
    expected = scores(model)
    answer = v1(client, {"instances": ROWS})
    assert answer.status_code == 200
    found = answer.json()["predictions"]
    np.testing.assert_allclose([each["score"] for each in found], expected, rtol=1e-5)
    np.testing.assert_allclose([each["double"] for each in found], 2 * expected, rtol=1e-5)
    named = {"users": USERS.tolist(), "tags": TAGS}
    found = v1(client, {"inputs": named}).json()["outputs"]
    np.testing.assert_allclose(found["score"], expected, rtol=1e-5)
    parts = {name: array.tolist() for name, array in v2_inputs().items()}
    assert v1(client, {"inputs": parts}).json()["outputs"] == found
    versioned = client.post("/v1/models/ctr/versions/7:predict", json={"instances": ROWS})
    assert versioned.json() == answer.json()
    assert versioned.headers["x-model-version"] == "7"


def test_the_watermark_of_an_answer(client):
    answer = v1(client, {"instances": ROWS})
    mark = int(answer.headers["x-watermark"])
    state = client.get("/v1/models/ctr").json()
    assert state["watermark"] == {
        "watermark": mark,
        "id": answer.headers["x-watermark-id"],
        "utc_ns": int(answer.headers["x-watermark-utc-ns"]),
    }
    assert v1(client, {"instances": ROWS}, headers={"x-min-watermark": str(mark)}).is_success
    late = v1(client, {"instances": ROWS}, headers={"x-min-watermark": str(mark + 1)})
    assert late.status_code == 412
    assert late.json() == {"error": f"model 'ctr' is at watermark {mark}, before {mark + 1}."}
    assert v1(client, {"instances": ROWS}, headers={"x-min-watermark": "now"}).status_code == 400


def test_what_the_server_says_of_models(client):
    assert client.get("/v1/models").json() == {"models": ["ctr", "plain"]}
    state = client.get("/v1/models/ctr").json()
    assert state["ready"]
    (version,) = state["model_version_status"]
    assert (version["version"], version["state"]) == ("7", "AVAILABLE")
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/v1/models/ctr/versions/8").status_code == 404
    signatures = client.get("/v1/models/ctr/metadata").json()["metadata"]["signature_def"]
    default = signatures["signature_def"]["serving_default"]
    assert default["inputs"]["users"]["dtype"] == "DT_INT64"
    dims = default["inputs"]["users"]["tensor_shape"]["dim"]
    assert [each["size"] for each in dims] == ["-1", "1"]
    described = client.get("/v2/models/ctr").json()
    assert described["platform"] == "tensorflow_savedmodel"
    assert described["versions"] == ["7"]
    assert {each["name"]: (each["datatype"], each["shape"]) for each in described["inputs"]} == {
        "users": ("INT64", [-1, 1]),
        "tags.values": ("INT64", [-1]),
        "tags.row_splits": ("INT64", [-1]),
    }
    assert [each["name"] for each in described["outputs"]] == ["double", "score"]
    for path in ("/", "/v2/health/live", "/v2/health/ready", "/v2/models/ctr/ready"):
        assert client.get(path).status_code == 200, path
    assert client.get("/v2").json()["name"] == "tf_dynemb"


WRONG = {
    "no JSON": (b"{", "is not JSON"),
    "NaN": (b'{"instances": [NaN]}', "is not JSON"),
    "a list": ([], "a request is"),
    "neither": ({"rows": []}, "a request is"),
    "both": ({"instances": ROWS, "inputs": {}}, "a request is"),
    "no rows": ({"instances": []}, "an element for each row"),
    "no names": ({"instances": [[1]]}, "has several inputs"),
    "other names": ({"instances": [{"users": [1]}, {"tags": [1]}]}, "the same names"),
    "missing": ({"instances": [{"users": [1]}]}, "input 'tags' is missing"),
    "unknown": ({"inputs": {"user": [[1]], "tags": [[1]]}}, "there is no input 'user'"),
    "half": (
        {"inputs": {"users": [[1]], "tags.values": [1]}},
        "input 'tags.row_splits' is missing",
    ),
    "twice": (
        {"inputs": {"users": [[1]], "tags": [[1]], "tags.values": [1], "tags.row_splits": [0, 1]}},
        "input 'tags' is there twice",
    ),
    "a float": ({"instances": [{"users": [1.5], "tags": [1]}]}, "got float"),
    "a bool": ({"instances": [{"users": [True], "tags": [1]}]}, "got bool"),
    "a string": ({"instances": [{"users": ["1"], "tags": [1]}]}, "got strings"),
    "null": ({"instances": [{"users": [None], "tags": [1]}]}, "got null"),
    "a bool among numbers": ({"instances": [{"users": [1], "tags": [1, True]}]}, "got bool"),
    "above int64": ({"instances": [{"users": [2**63], "tags": [1]}]}, "out of range"),
    "another shape": ({"instances": [{"users": [1, 2], "tags": [1]}]}, "got the shape [1, 2]"),
    "unequal rows": (
        {"instances": [{"users": [1], "tags": [1]}, {"users": [1, 2], "tags": [1]}]},
        "of different shapes",
    ),
    "a flat bag": ({"instances": [{"users": [1], "tags": 1}]}, "is a list for each row"),
    "other numbers of rows": ({"inputs": {"users": [[1]], "tags": [[1], [2]]}}, "numbers of rows"),
    "wrong splits": (
        {"inputs": {"users": [[1]], "tags.values": [1], "tags.row_splits": [0, 2]}},
        "do not divide 1 values",
    ),
    "falling splits": (
        {"inputs": {"users": [[1], [2]], "tags.values": [1], "tags.row_splits": [0, 2, 1]}},
        "do not divide 1 values",
    ),
    "another signature": ({"signature_name": "apply_delta", "instances": ROWS}, "no signature"),
    "no name": ({"signature_name": 5, "instances": ROWS}, "signature_name is a string"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests(client, case):
    body, message = WRONG[case]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/v1/models/ctr:predict", content=content)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]


def v2_body(**changes):
    given = [
        {"name": name, "shape": list(a.shape), "datatype": "INT64", "data": a.ravel().tolist()}
        for name, a in v2_inputs().items()
    ]
    return {"inputs": given, **changes}


def changed(**changes):
    body = v2_body()
    body["inputs"][0].update(changes)
    return body


WRONG_TENSORS = {
    "no inputs": ({}, 'a request is {"inputs"'),
    "a number": ({"inputs": [5]}, "an input has"),
    "no shape": (changed(shape="x"), '"shape" is a list'),
    "a shape of floats": (changed(shape=[3.0, 1]), '"shape" is a list'),
    "another shape": (changed(shape=[4, 1]), "has 3 elements, and the shape [4, 1]"),
    "a negative shape": (changed(shape=[-3, -1]), "has the shape [-3, -1]"),
    "a huge shape": (changed(shape=[2**62, 4]), "has the shape"),
    "another type": (changed(datatype="FP32"), "got float32"),
    "an unknown type": (changed(datatype="INT65"), "unknown datatype 'INT65'"),
    "no data": (changed(data="AAAA"), '"data" is a list'),
    "no inputs of it": (v2_body(inputs=[]), "is missing"),
    "twice": (v2_body(inputs=v2_body()["inputs"] * 2), "is there twice"),
    "another output": (v2_body(outputs=[{"name": "x"}]), "there is no output 'x'"),
    "an output twice": (v2_body(outputs=[{"name": "score"}] * 2), "asked for twice"),
    "outputs": (v2_body(outputs=[5]), 'has a "name"'),
    "parameters": (v2_body(parameters=[]), "an object"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors(client, case):
    body, message = WRONG_TENSORS[case]
    answer = client.post("/v2/models/ctr/infer", json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]


@pytest.mark.parametrize("length", ["-1", "1e3", "x", "1000000"])
def test_a_wrong_length_of_the_json(client, length):
    headers = {"inference-header-content-length": length}
    answer = client.post("/v2/models/ctr/infer", json=v2_body(), headers=headers)
    assert answer.status_code == 400, answer.text
    assert f"is '{length}'" in answer.json()["error"]


def test_tensors_in_json(client, model):
    answer = client.post("/v2/models/ctr/infer", json=v2_body(id="5", outputs=[{"name": "score"}]))
    found = answer.json()
    assert (found["id"], found["model_name"], found["model_version"]) == ("5", "ctr", "7")
    assert found["parameters"]["watermark"] == int(answer.headers["x-watermark"])
    (output,) = found["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("score", "FP32", [3, 1])
    np.testing.assert_allclose(output["data"], scores(model).ravel(), rtol=1e-5)


def triton_inputs(module):
    given = []
    for name, array in v2_inputs().items():
        given.append(module.InferInput(name, array.shape, "INT64"))
        given[-1].set_data_from_numpy(array)
    return given


def check_triton(triton, model, **options):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("ctr")
    given = triton_inputs(options.pop("module"))
    found = triton.infer("ctr", given, **options)
    np.testing.assert_allclose(found.as_numpy("score"), scores(model), rtol=1e-5)
    versioned = triton.infer("ctr", given, model_version="7")
    np.testing.assert_array_equal(versioned.as_numpy("score"), found.as_numpy("score"))
    return found


def test_triton_over_http(server, model):
    http = pytest.importorskip("tritonclient.http")
    with http.InferenceServerClient(server.url.removeprefix("http://")) as triton:
        found = check_triton(triton, model, module=http)
        assert found.get_response()["parameters"]["watermark_id"]
        assert triton.get_model_metadata("ctr")["versions"] == ["7"]
        asked = [http.InferRequestedOutput("score", binary_data=True)]
        again = triton.infer("ctr", triton_inputs(http), outputs=asked)
        np.testing.assert_array_equal(again.as_numpy("score"), found.as_numpy("score"))
        assert again.as_numpy("double") is None
        with pytest.raises(http.InferenceServerException, match="no version '8'"):
            triton.infer("ctr", triton_inputs(http), model_version="8")


def triton_grpc(server, *arguments, scores=None):
    """Runs NVIDIA's gRPC client."""
    program = pathlib.Path(__file__).with_name("triton_grpc_client.py")
    given = None if scores is None else json.dumps(scores.tolist())
    command = [sys.executable, str(program), server.address, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_triton_over_grpc(server, model):
    triton_grpc(server, scores=scores(model))


KSERVE = """
import asyncio, json, sys, kserve
async def ask(url, body):
    client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol=sys.argv[2]))
    ready = await client.is_model_ready(url, "ctr"), await client.is_server_live(url)
    found = await client.infer(url, body, model_name="ctr")
    await client.close()
    return [ready, found if sys.argv[2] == "v1" else found.to_rest()[0]]
print(json.dumps(asyncio.run(ask(sys.argv[1], json.load(sys.stdin)))))
"""


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_kserve_client(server, model, protocol):
    body = json.dumps({"instances": ROWS} if protocol == "v1" else v2_body())
    command = [sys.executable, "-c", KSERVE, server.url, protocol]
    done = subprocess.run(command, input=body, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    ready, found = json.loads(done.stdout.splitlines()[-1])
    assert ready == [True, True]
    if protocol == "v1":
        scored = [each["score"] for each in found["predictions"]]
    else:
        (output,) = [each for each in found["outputs"] if each["name"] == "score"]
        scored = np.reshape(output["data"], output["shape"])
    np.testing.assert_allclose(scored, scores(model), rtol=1e-5)


def metric(client, name, **labels):
    """The value of a metric; 0 if it is not there."""
    from prometheus_client.parser import text_string_to_metric_families as families

    for family in families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return 0


def test_metrics(client):
    names = ("requests_total", "request_seconds_count")
    labels = {"model": "plain", "protocol": "v1"}
    before = [metric(client, f"tf_dynemb_{name}", **labels) for name in names]
    looked_up = metric(client, "tf_dynemb_keys_total", model="plain", found="true")
    v1(client, {"instances": [{"users": [3], "tags": [4, 5]}]}, "plain")
    v1(client, {"instances": []}, "plain")
    assert metric(client, "tf_dynemb_requests_total", code="OK", **labels) == before[0] + 1
    wrong = metric(client, "tf_dynemb_requests_total", code="INVALID_ARGUMENT", **labels)
    assert wrong == 1
    assert metric(client, "tf_dynemb_request_seconds_count", **labels) == before[1] + 2
    assert metric(client, "tf_dynemb_keys_total", model="plain", found="true") == looked_up + 3
    for name in (
        *("lookup_seconds_total", "call_seconds_sum", "queue_seconds_count", "batch_rows_count"),
        *("model_ready", "watermark", "watermark_age_seconds", "table_rows", "table_bytes"),
        *("mapped_bytes", "resident_bytes", "versions_loaded_total"),
    ):
        assert metric(client, f"tf_dynemb_{name}", model="plain") > 0, name
    assert metric(client, "tf_dynemb_follow_failed", model="plain") == 0
    assert metric(client, "tf_dynemb_table_rows", model="plain") == 9
    assert metric(client, "tf_dynemb_snapshots_refused_total", model="plain") == 0


def test_requests_at_once(client, model):
    rng = np.random.default_rng(0)
    asked = [
        (rng.integers(0, 20, [n, 1]), [rng.integers(0, 20, k).tolist() for k in range(n)])
        for n in rng.integers(1, 9, 60)
    ]

    def ask(users, tags):
        return v1(client, {"inputs": {"users": users.tolist(), "tags": tags}}).json()["outputs"]

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda each: ask(*each), asked))
    for (users, tags), answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(
            answer["score"], scores(model, users, tags), rtol=1e-4, atol=1e-5
        )


def test_new_versions_and_deltas_under_load(tmp_path):
    """No request fails, and each answer is the one of its version and its watermark."""
    models = {"1": build()}
    export(models["1"], tmp_path, "1")
    expected = {}

    def note(version):
        mark = de.incremental_dump(tmp_path / "chain", models[version])
        expected[mark.id] = scores(models[version])

    note("1")
    with Server(f"--model=ctr={tmp_path}/models", "--threads=2") as server:
        with client_of(server) as client:
            ended, answers = [], []

            def load():
                while not ended:
                    answer = v1(client, {"instances": ROWS})
                    answers.append((answer.status_code, answer.json(), dict(answer.headers)))

            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                running = [pool.submit(load) for _ in range(3)]
                try:
                    eventually(lambda: answers)
                    for number in range(2, 6):
                        for step in range(5):
                            change(models["1"], 100 * number + step)
                            note("1")
                            time.sleep(0.05)
                        export(models["1"], tmp_path, str(number))
                        eventually(lambda n=number: answers[-1][2]["x-model-version"] == str(n))
                    last = list(expected)[-1]
                    eventually(lambda: answers[-1][2]["x-watermark-id"] == last)
                finally:
                    ended.append(True)
                for each in running:
                    each.result()
            assert len(answers) > 100
            assert {status for status, _, _ in answers} == {200}
            assert len({headers["x-watermark-id"] for _, _, headers in answers}) > 10
            assert {headers["x-model-version"] for _, _, headers in answers} == set("12345")
            for _, answer, headers in answers:
                if headers["x-watermark-id"] in expected:
                    found = [each["score"] for each in answer["predictions"]]
                    np.testing.assert_allclose(
                        found, expected[headers["x-watermark-id"]], rtol=1e-4, atol=1e-5
                    )
            assert sum(h["x-watermark-id"] in expected for _, _, h in answers) > len(answers) / 2
            # A version that cannot be loaded leaves the one before.
            (tmp_path / "models" / "9").mkdir()
            (tmp_path / "models" / "9" / "saved_model.pb").write_bytes(b"no graph")
            eventually(lambda: metric(client, "tf_dynemb_versions_failed_total", model="ctr"))
            states = client.get("/v1/models/ctr").json()["model_version_status"]
            assert [each["state"] for each in states] == ["AVAILABLE", "START"]
            assert v1(client, {"instances": ROWS}).headers["x-model-version"] == "5"
            # Removing the newest good version goes back to the one before.
            (tmp_path / "models" / "5").rename(tmp_path / "removed")
            eventually(lambda: v1(client, {"instances": ROWS}).headers["x-model-version"] == "4")
        assert server.end() == 0


def test_a_delta_that_is_damaged(tmp_path):
    model = build()
    export(model, tmp_path, "1")
    with Server(f"--model=ctr={tmp_path}/models") as server, client_of(server) as client:
        applied = metric(client, "tf_dynemb_snapshots_applied_total", model="ctr")
        change(model, 5)
        before = scores(model)
        mark = de.incremental_dump(tmp_path / "chain", model)
        eventually(lambda: v1(client, {"instances": ROWS}).headers["x-watermark-id"] == mark.id)
        change(model, 6)
        de.incremental_dump(tmp_path / "elsewhere", model, since=mark)
        (delta,) = (tmp_path / "elsewhere").glob("*-delta-*")
        for file in delta.glob("*.vectors.npy"):
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        delta.rename(tmp_path / "chain" / f"00000009{delta.name[8:]}")
        eventually(lambda: metric(client, "tf_dynemb_follow_failed", model="ctr"))
        time.sleep(0.3)
        assert metric(client, "tf_dynemb_snapshots_refused_total", model="ctr") == 1
        now = metric(client, "tf_dynemb_snapshots_applied_total", model="ctr")
        assert now == applied + 1
        assert "is damaged" in client.get("/v1/models/ctr").json()["follow_error"]
        # It goes on, and is ready: another server would read the same snapshot.
        assert client.get("/v2/health/ready").status_code == 200
        answer = v1(client, {"instances": ROWS})
        assert answer.headers["x-watermark-id"] == mark.id
        found = [each["score"] for each in answer.json()["predictions"]]
        np.testing.assert_allclose(found, before, rtol=1e-5)


def test_limits_tokens_and_control(folder, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    with Server(
        f"--model=ctr={folder}/models",
        *("--max-request-bytes=2000", "--max-rows=4", "--max-elements=30", "--max-requests=1"),
        *(f"--token-file={token}", "--model-control", "--timeout-seconds=1"),
    ) as server:
        authorization = {"authorization": "Bearer secret"}
        with client_of(server) as client:
            for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
                answer = v1(client, {"instances": ROWS}, headers=headers)
                assert answer.status_code == 401
                assert client.get("/metrics", headers=headers).status_code == 401
            assert client.get("/v2/health/ready").status_code == 200
            client.headers = authorization
            assert v1(client, {"instances": ROWS}).status_code == 200
            many = v1(client, {"instances": [{"users": [1], "tags": []}] * 5})
            assert (many.status_code, "1 to 4" in many.text) == (400, True)
            large = v1(client, {"instances": [{"users": [1], "tags": [1] * 40}]})
            assert (large.status_code, "elements" in large.text) == (400, True)
            huge = v1(client, {"instances": [{"users": [1], "tags": [1] * 2000}]})
            assert huge.status_code == 413
            chunks = client.post("/v1/models/ctr:predict", content=iter([b"x" * 1500] * 2))
            assert chunks.status_code == 413
            assert client.post("/v2/repository/models/x/load").status_code == 404
            assert client.post("/v2/repository/models/ctr/unload").json()["unload"]
            assert v1(client, {"instances": ROWS}).status_code == 503
            assert client.get("/v1/models/ctr").status_code == 503
            assert client.get("/v2/health/ready").status_code == 200
            time.sleep(0.3)
            assert v1(client, {"instances": ROWS}).status_code == 503
            assert client.post("/v2/repository/models/ctr/load").json()["load"]
            assert v1(client, {"instances": ROWS}).status_code == 200

            # Bodies that do not come are refused in time, and there is a limit on them.
            def slow():
                yield b"{"
                time.sleep(3)
                yield b"}"

            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                waiting = [
                    pool.submit(client.post, "/v1/models/ctr:predict", content=slow())
                    for _ in range(4)
                ]
                busy = eventually(lambda: (a := v1(client, {"instances": ROWS})).is_error and a)
                assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
                for each in waiting:
                    with contextlib.suppress(httpx.HTTPError):  # it may have closed the connection
                        assert each.result().status_code == 408
            assert v1(client, {"instances": ROWS}).status_code == 200
        triton_grpc(server, "Bearer secret")
        with grpc.insecure_channel(server.address) as channel:
            sent = {"metadata": [("authorization", "Bearer secret")], "timeout": 30}
            name = b"\x0a\x03ctr"  # a message of KServe; NVIDIA's client sends its own above
            for call in ("Unload", "Load"):
                path = f"/inference.GRPCInferenceService/RepositoryModel{call}"
                assert channel.unary_unary(path)(name, **sent) == name + b"\x10\x01"


def test_tls(folder, tmp_path):
    authority = certificates.Authority(tmp_path / "ca")
    certificate, key, trusted = authority.rank()
    files = [f"--tls-cert={certificate}", f"--tls-key={key}"]
    with Server(f"--model=ctr={folder}/models", *files) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=trusted)
        context.check_hostname = False  # the test's certificates name no host
        with client_of(server, verify=context) as client:
            assert v1(client, {"instances": ROWS}).status_code == 200
        with pytest.raises(httpx.ConnectError), client_of(server) as client:
            v1(client, {"instances": ROWS})
        certificate = pathlib.Path(trusted).read_bytes()
        credentials = grpc.ssl_channel_credentials(certificate)
        options = [("grpc.ssl_target_name_override", "rank")]
        for secure, answers in (
            (grpc.secure_channel(server.address, credentials, options), True),
            (grpc.insecure_channel(server.address), False),
        ):
            with secure as channel:
                live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
                try:
                    found = live(b"", timeout=10)
                    assert answers
                    assert found == b"\x08\x01"
                except grpc.RpcError:
                    assert not answers


def test_a_directory_for_copies(folder, tmp_path):
    left = tmp_path / "cache/models/ctr/1-0123"
    left.mkdir(parents=True)
    options = [f"--model=ctr={folder}/models", f"--cache={tmp_path}/cache"]
    with Server(*options) as server:
        assert not left.exists()
        with Server(*options) as other:
            assert other.url is None
        assert "another server uses" in "".join(other.lines)
        assert server.end() == 0
    with Server(*options) as server:
        assert server.url


def test_what_is_refused_before_its_body(folder, tmp_path):
    """The connection is closed: nobody reads the rest."""
    token = tmp_path / "token"
    token.write_text("secret")
    with Server(f"--model=ctr={folder}/models", f"--token-file={token}") as server:
        url = urllib.parse.urlsplit(server.url)
        predict, known = "/v1/models/ctr:predict", "Authorization: Bearer secret\r\n"
        for path, headers, size, status in (
            (predict, "", 1_000_000, b"401"),
            ("/v2/health/live", "", 1_000_000, b"405"),
            (predict, known, 100_000_000, b"413"),
        ):
            with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
                lines = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {size}"
                connection.sendall(f"{lines}\r\n\r\n{{".encode())
                answer = b""
                while data := connection.recv(1000):  # it ends, although the body has not come
                    answer += data
                assert answer.split()[1] == status
        lower = {"authorization": "bearer secret"}
        with client_of(server, headers=lower) as client:
            assert v1(client, {"instances": ROWS}).status_code == 200


def test_a_call_that_does_not_end(tmp_path):
    """The server ends in time although a call of a model does not."""
    model = tf.Module()
    spec = tf.TensorSpec([], tf.int64, "steps")
    model.run = tf.function(
        lambda steps: tf.while_loop(lambda i: i < steps, lambda i: [i + 1], [0 * steps])[0],
        input_signature=[spec],
    )
    tf.saved_model.save(model, str(tmp_path / "model"), signatures=model.run)
    program = (
        "import sys; sys.argv[0] = 'serve'; import tf_dynemb.serve.server as server;"
        "server._GRACE_SECONDS = 1; from tf_dynemb.serve.__main__ import main; main()"
    )
    with Server(f"--model=m={tmp_path}/model", "--timeout-seconds=1", program=program) as server:
        with client_of(server) as client:
            answer = v1(client, {"inputs": 2**60}, "m")
        assert answer.status_code == 504
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 15


def test_the_end_of_a_server(folder):
    """SIGTERM: not ready, still answering, then requests end and the process does."""
    with Server(f"--model=ctr={folder}/models", "--drain-seconds=1") as server:
        with client_of(server) as client:
            assert v1(client, {"instances": ROWS}).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: client.get("/v2/health/ready").status_code == 503)
            assert client.get("/v2/health/live").status_code == 200
            assert v1(client, {"instances": ROWS}).status_code == 200
        assert server.process.wait(20) == 0


def test_connections_that_send_too_much_end(folder):
    with Server(f"--model=ctr={folder}/models", "--max-request-bytes=1000") as server:
        url = urllib.parse.urlsplit(server.url)

        def answers(sent):
            with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
                with contextlib.suppress(ConnectionError):  # it may end before all is sent
                    connection.sendall(sent)
                found = b""
                with contextlib.suppress(ConnectionError):
                    while data := connection.recv(65536):
                        found += data
                return found.count(b"HTTP/1.1 ")

        head = b" HTTP/1.1\r\nHost: x\r\n"
        # Requests that do not wait for answers.
        assert answers((b"GET /v2/health/live" + head + b"\r\n") * 500) < 500
        # Chunks of one byte, with extensions.
        chunked = b"POST /v1/models/ctr:predict" + head + b"Transfer-Encoding: chunked\r\n\r\n"
        assert answers(chunked + (b"1;" + b"e" * 2000 + b"\r\nx\r\n") * 900) == 0
        with client_of(server) as client:
            assert client.get("/v2/health/live").status_code == 200


def test_a_second_signal_ends_the_drain(folder):
    with Server(f"--model=ctr={folder}/models", "--drain-seconds=600") as server:
        server.process.send_signal(signal.SIGTERM)
        with client_of(server) as client:
            eventually(lambda: client.get("/v2/health/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=ctr={folder}/nothing"], "there is no SavedModel"),
        (["--model=ctr={folder}/models", "--http-port=1{port}"], "cannot listen"),
        (["--model=ctr={folder}/models", "--token-file={folder}/none"], "--token-file"),
        (["--model=ctr=nothing://x"], "--model"),
        (
            ["--model=ctr={folder}/models", "--tls-cert={folder}/x", "--tls-key={folder}/x"],
            "--tls-cert",
        ),
    ],
)
def test_servers_that_do_not_start(folder, server, arguments, message):
    port = server.url.rpartition(":")[2]
    given = [
        each.format(folder=folder, port=port).replace("=1" + port, f"={port}") for each in arguments
    ]
    with Server(*given) as failed:
        assert failed.url is None
        assert failed.process.returncode in (1, 2)
    assert message in "".join(failed.lines)
    assert "Traceback" not in "".join(failed.lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model"),
        (["--model=ctr"], "is not NAME=PATH"),
        (["--model=a/b=x"], "is not NAME=PATH"),
        (["--model=a=x", "--model=a=y"], "is there twice"),
        (["--model=a=x", "--follow=b=y"], "no --model of this name"),
        (["--model=a=x", "--threads=0"], "is not above 0"),
        (["--model=a=x", "--max-rows=x"], "invalid"),
        (["--model=..=x"], "is not NAME=PATH"),
        (["--model=a=x", "--grpc-port=70000"], "is no port"),
        (["--model=a=x", "--drain-seconds=nan"], "is no number of seconds"),
        (["--model=a=x", "--tls-cert=y"], "pass both"),
    ],
)
def test_wrong_command_lines(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.setattr(sys, "argv", ["serve", "--model=ctr=x"])
    assert main() == 1
    assert "pip install 'tf_dynemb[serve]'" in capsys.readouterr().err


def test_commands_of_the_documentation(tmp_path):
    """The curl commands of docs/server.md are answered."""
    documents = pathlib.Path(__file__).parents[2] / "docs"
    if not documents.is_dir() or shutil.which("curl") is None:
        pytest.skip("needs docs/ and curl")
    users, items = (keras.Input([1], dtype="int64", name=name) for name in ("users", "items"))
    table = de.layers.Embedding(4, combiner="sum", name="table")
    both = keras.layers.Concatenate()([table(users), table(items)])
    export(keras.Model([users, items], keras.layers.Dense(1)(both)), tmp_path)
    text = (documents / "server.md").read_text()
    commands = re.findall(r"^    (curl .+)$", text, re.MULTILINE)
    assert len(commands) == 7
    with Server(f"--model=ctr={tmp_path}/models") as server:
        for command in commands:
            asked = command.replace("localhost:8080", server.url).replace("curl -s", "curl -sf")
            done = subprocess.run(shlex.split(asked), capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, command
            assert done.stdout


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the spans that an OpenTelemetry collector gets."""

    spans: ClassVar[list] = []

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_traces(folder):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    Collector.spans.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
        given = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        with Server(f"--model=ctr={folder}/models", environment=given) as server:
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            with client_of(server, headers={"traceparent": trace}) as client:
                answer = v1(client, {"instances": ROWS})
                v1(client, {"instances": []})
            assert server.end() == 0
        collector.shutdown()
    named = {}
    for span in Collector.spans:
        named.setdefault(span.name, []).append(span)
    good, bad = named["predict"]
    assert {span.trace_id.hex() for span in Collector.spans} == {trace[3:35]}
    assert good.parent_span_id.hex() == trace[36:52]
    attributes = {each.key: each.value.string_value for each in good.attributes}
    assert attributes["model"] == "ctr"
    assert attributes["x-watermark-id"] == answer.headers["x-watermark-id"]
    (queue,), (call,) = named["queue"], named["call"]
    assert queue.parent_span_id == call.parent_span_id == good.span_id
    assert good.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano == call.start_time_unix_nano < call.end_time_unix_nano
    assert call.end_time_unix_nano <= good.end_time_unix_nano
    assert bad.status.code == 2
    assert "an element for each row" in bad.status.message
