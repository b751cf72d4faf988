"""A program: NVIDIA's gRPC client asks a server. KServe's messages cannot be in its process.

python triton_grpc_client.py ADDRESS [AUTHORIZATION] < scores.json
"""

import json
import sys

import numpy as np
import pytest
import tritonclient.grpc as grpc

USERS = np.array([[1], [2], [2**40]])
VALUES, SPLITS = np.array([1, 2, 3, 7]), np.array([0, 3, 3, 4])


def inputs():
    given = []
    for name, array in (("users", USERS), ("tags.values", VALUES), ("tags.row_splits", SPLITS)):
        given.append(grpc.InferInput(name, array.shape, "INT64"))
        given[-1].set_data_from_numpy(array)
    return given


def refused(status, message, call, *arguments, **options):
    with pytest.raises(grpc.InferenceServerException, match=message) as caught:
        call(*arguments, **options)
    assert status in caught.value.status()


def check_answers(triton, scores):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("ctr")
    found = triton.infer("ctr", inputs())
    np.testing.assert_allclose(found.as_numpy("score"), scores, rtol=1e-5)
    parameters = found.get_response().parameters
    mark = parameters["watermark"].int64_param
    assert parameters["watermark_id"].string_param
    versioned = triton.infer("ctr", inputs(), model_version="7")
    np.testing.assert_array_equal(versioned.as_numpy("score"), found.as_numpy("score"))
    metadata = triton.get_model_metadata("ctr")
    assert list(metadata.versions) == ["7"]
    assert [list(each.shape) for each in metadata.inputs if each.name == "users"] == [[-1, 1]]
    least = {"x-min-watermark": str(mark)}
    assert triton.infer("ctr", inputs(), headers=least)
    least = {"x-min-watermark": str(mark + 1)}
    refused("FAILED_PRECONDITION", "before", triton.infer, "ctr", inputs(), headers=least)
    least = {"x-min-watermark": "now"}
    refused("INVALID_ARGUMENT", "is not an integer", triton.infer, "ctr", inputs(), headers=least)
    refused("NOT_FOUND", "no model 'other'", triton.infer, "other", inputs())
    refused("NOT_FOUND", "no version '8'", triton.infer, "ctr", inputs(), model_version="8")
    refused("INVALID_ARGUMENT", "is missing", triton.infer, "ctr", inputs()[:2])
    refused("PERMISSION_DENIED", "--model-control", triton.unload_model, "ctr")
    large = grpc.InferInput("users", [3_000_000, 1], "INT64")
    large.set_data_from_numpy(np.zeros([3_000_000, 1], np.int64))
    refused("RESOURCE_EXHAUSTED", "larger than max", triton.infer, "ctr", [large])


def check_token(triton, authorization):
    headers = {"authorization": authorization}
    assert triton.is_server_live()
    refused("UNAUTHENTICATED", "no valid token", triton.infer, "ctr", inputs())
    assert triton.infer("ctr", inputs(), headers=headers)
    refused("UNAUTHENTICATED", "no valid token", triton.unload_model, "ctr")
    refused("NOT_FOUND", "no model 'other'", triton.unload_model, "other", headers=headers)
    triton.unload_model("ctr", headers=headers)
    assert not triton.is_model_ready("ctr", headers=headers)
    refused("UNAVAILABLE", "not loaded", triton.infer, "ctr", inputs(), headers=headers)
    triton.load_model("ctr", headers=headers)
    assert triton.infer("ctr", inputs(), headers=headers)


def main():
    address, *authorization = sys.argv[1:]
    with grpc.InferenceServerClient(address) as triton:
        if authorization:
            check_token(triton, *authorization)
        else:
            check_answers(triton, np.array(json.load(sys.stdin)))


if __name__ == "__main__":
    main()
