"""python -m tf_dynemb.serve: whom it answers, and what it refuses."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import ssl
import time
import urllib.parse

from serve_helpers import (
    ROWS,
    Server,
    client_of,
    eventually,
    triton_grpc,
    v1,
)

# isort: split
import certificates
import grpc
import httpx
import pytest


def connected(server, path, sent):
    """A connection that has sent a line and a host, and what is given after them."""
    url = urllib.parse.urlsplit(server.url)
    connection = socket.create_connection((url.hostname, url.port), timeout=20)
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{sent}".encode())
    return connection


def status_of(connection):
    """The status of the one answer, after which the server closes the connection."""
    answer = b""
    with connection:
        while data := connection.recv(1000):
            answer += data
    return answer.split()[1]


def test_limits_tokens_and_control(served, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    with Server(
        f"--model=ctr={served}/models",
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

            # There is a limit on bodies that do not come, and they are refused in time.
            unfinished = []

            def refused():
                sent = "Authorization: Bearer secret\r\nContent-Length: 10\r\n\r\n{"
                unfinished.append(connected(server, "/v1/models/ctr:predict", sent))
                answer = v1(client, {"instances": ROWS})
                return answer if answer.is_error else None

            busy = eventually(refused)
            assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
            # One that came while another request was read may be refused as well.
            statuses = [status_of(each) for each in unfinished]
            assert statuses[0] == b"408"
            assert set(statuses) <= {b"408", b"429"}
            assert v1(client, {"instances": ROWS}).status_code == 200
        triton_grpc(server, "Bearer secret")
        with grpc.insecure_channel(server.address) as channel:
            sent = {"metadata": [("authorization", "Bearer secret")], "timeout": 30}
            name = b"\x0a\x03ctr"  # a message of KServe; NVIDIA's client sends its own above
            for call in ("Unload", "Load"):
                path = f"/inference.GRPCInferenceService/RepositoryModel{call}"
                assert channel.unary_unary(path)(name, **sent) == name + b"\x10\x01"


def test_tls(served, tmp_path):
    authority = certificates.Authority(tmp_path / "ca")
    certificate, key, trusted = authority.rank()
    files = [f"--tls-cert={certificate}", f"--tls-key={key}"]
    with Server(f"--model=ctr={served}/models", *files) as server:
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


def test_what_is_refused_before_its_body(served, tmp_path):
    """The connection is closed: nobody reads the rest."""
    token = tmp_path / "token"
    token.write_text("secret")
    with Server(f"--model=ctr={served}/models", f"--token-file={token}") as server:
        predict, known = "/v1/models/ctr:predict", "Authorization: Bearer secret\r\n"
        for path, headers, size, status in (
            (predict, "", 1_000_000, b"401"),
            ("/v2/health/live", "", 1_000_000, b"405"),
            (predict, known, 100_000_000, b"413"),
        ):
            sent = f"{headers}Content-Length: {size}\r\n\r\n{{"
            assert status_of(connected(server, path, sent)) == status
        lower = {"authorization": "bearer secret"}
        with client_of(server, headers=lower) as client:
            assert v1(client, {"instances": ROWS}).status_code == 200


def test_connections_that_send_too_much_end(served):
    with Server(f"--model=ctr={served}/models", "--max-request-bytes=1000") as server:
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
