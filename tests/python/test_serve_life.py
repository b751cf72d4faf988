"""python -m tf_dynemb.serve: new versions and snapshots, starts and ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import socket
import subprocess
import sys
import time

from serve_helpers import (
    ROWS,
    Server,
    build,
    change,
    client_of,
    eventually,
    export,
    metric,
    scores,
    v1,
)

# isort: split
import httpx
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb.serve.__main__ import main, parse


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


def test_a_directory_for_copies(served, tmp_path):
    left = tmp_path / "cache/models/ctr/1-0123"
    left.mkdir(parents=True)
    options = [f"--model=ctr={served}/models", f"--cache={tmp_path}/cache"]
    with Server(*options) as server:
        assert not left.exists()
        with Server(*options) as other:
            assert other.url is None
        assert "another server uses" in "".join(other.lines)
        assert server.end() == 0
    with Server(*options) as server:
        assert server.url


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


def test_the_end_of_a_server(served):
    """SIGTERM: not ready, still answering, then requests end and the process does."""
    with Server(f"--model=ctr={served}/models", "--drain-seconds=1") as server:
        with client_of(server) as client:
            assert v1(client, {"instances": ROWS}).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: client.get("/v2/health/ready").status_code == 503)
            assert client.get("/v2/health/live").status_code == 200
            assert v1(client, {"instances": ROWS}).status_code == 200
        assert server.process.wait(20) == 0


def test_a_signal_while_a_model_is_loaded(served):
    """The server is live, not ready, and ends in time although the loading does not."""
    program = (
        "import sys; sys.argv[0] = 'serve'; import threading;"
        "import tf_dynemb.serve.server as server, tf_dynemb.serve.model as model;"
        "server._GRACE_SECONDS = 1; model.LoadedModel = lambda path: threading.Event().wait();"
        "from tf_dynemb.serve.__main__ import main; main()"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", program, f"--model=ctr={served}/models"]
    command += [f"--http-port={port}", "--grpc-port=-1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

                def status(path):
                    with contextlib.suppress(httpx.ConnectError):
                        return client.get(path).status_code

                eventually(lambda: status("/v2/health/live") == 200, seconds=120)
                assert status("/v2/health/ready") == 503
                assert v1(client, {"instances": ROWS}).status_code == 503
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_second_signal_ends_the_drain(served):
    with Server(f"--model=ctr={served}/models", "--drain-seconds=600") as server:
        server.process.send_signal(signal.SIGTERM)
        with client_of(server) as client:
            eventually(lambda: client.get("/v2/health/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=ctr={served}/nothing"], "there is no SavedModel at {served}/nothing"),
        (["--model=ctr={served}/models", "--http-port={port}"], "cannot listen"),
        (["--model=ctr={served}/models", "--token-file={served}/none"], "--token-file"),
        (["--model=ctr=nothing://x"], "--model"),
        (
            ["--model=ctr={served}/models", "--tls-cert={served}/x", "--tls-key={served}/x"],
            "--tls-cert",
        ),
        (["--model=m={served}", "--device=TPU:0"], "--device: device must be 'CPU', or a GPU"),
        (["--model=m={served}", "--device=GPU:9"], "--device: "),
    ],
)
def test_servers_that_do_not_start(served, arguments, message):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        given = [each.format(served=served, port=port) for each in arguments]
        with Server(*given) as failed:
            assert failed.url is None
            assert failed.process.returncode in (1, 2)
    assert message.format(served=served) in "".join(failed.lines)
    assert "Traceback" not in "".join(failed.lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model"),
        (["--model=ctr"], "is not NAME=PATH"),
        (["--model=a/b=x"], "is not NAME=PATH"),
        (["--model=a=x", "--model=a=y"], "a name can be given once, got a, a"),
        (["--model=a=x", "--follow=b=y"], "no --model of this name"),
        (["--model=a=x", "--threads=0"], "is not above 0"),
        (["--model=a=x", "--max-rows=x"], "invalid"),
        (["--model=..=x"], "is not NAME=PATH"),
        (["--model=a=x", "--grpc-port=70000"], "is not a port"),
        (["--model=a=x", "--drain-seconds=nan"], "is not a number of at least 0"),
        (["--model=a=x", "--tls-cert=y"], "pass both"),
        (["--model=a=x", "--max-hbm-for-vectors=-1"], "is not a number of at least 0"),
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
