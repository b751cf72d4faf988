"""python -m tf_dynemb.serve: answers by both protocols, to clients that nobody here wrote."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
from serve_helpers import (
    ROWS,
    TAGS,
    USERS,
    Server,
    build,
    client_of,
    export,
    metric,
    scores,
    triton_grpc,
    v1,
    v2_inputs,
)

import tf_dynemb as de


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
