"""Copies in object stores when something fails: requests, servers, writers, files."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import fsspec
import numpy as np
import pytest
from cli_helpers import fails
from storage_helpers import flipped
from store_helpers import PUBLISH, objects
from test_served_copy import Trainer, answers

from tf_dynemb import cli
from tf_dynemb.chains.publish import publish
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain, DataLossError, files
from tf_dynemb.storage.local_place import list_snapshots
from tf_dynemb.storage.snapshot import Name
from tf_dynemb.storage.stores import Store


def test_an_answer_that_was_lost(tmp_path):
    """The library tries to create an object again that it has created."""
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1})
    url = f"memory://{os.urandom(6).hex()}"
    fs = fsspec.filesystem("memory")
    real = fs.pipe_file

    def twice(path, value, mode="overwrite"):
        real(path, value, mode=mode)
        if mode == "create":
            real(path, value, mode=mode)

    with mock.patch.object(fs, "pipe_file", twice):
        publish(url, from_=trainer.path)
    assert len(Store(url).snapshots()) == 1


class Failing:
    """Calls of the library, of which one fails, or all from it on."""

    def __init__(self, after, once):
        self.left, self.once = after, once

    def __call__(self, real):
        def call(*args, **options):
            self.left -= 1
            if self.left == -1 if self.once else self.left < 0:
                raise ConnectionError("planted")
            return real(*args, **options)

        return call


CALLS = ("put_file", "pipe_file", "get_file", "cat_file", "ls", "rm_file", "rm")


@pytest.mark.filterwarnings("ignore:superseded snapshots cannot be removed")
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("once", [False, True])
def test_requests_that_fail(tmp_path, direction, once):
    """Wherever it fails, there are whole snapshots, and the next call goes on."""
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1, 2, 3})
    old = f"memory://old{os.urandom(4).hex()}"
    publish(old, from_=trainer.path)
    trainer.do("delta", {2, 4})
    trainer.do("base", {5})
    trainer.do("delta", {6})
    new = f"memory://new{os.urandom(4).hex()}"
    publish(new, from_=trainer.path)
    fs = fsspec.filesystem("memory")
    lengths = []
    while lengths[-1:] != ["done"]:
        url = f"memory://{os.urandom(6).hex()}"
        local = tmp_path / os.urandom(4).hex()
        fs.copy(old, url, recursive=True)
        fail = Failing(len(lengths), once)
        target, source = (url, trainer.path) if direction == "up" else (local, new)
        with contextlib.ExitStack() as stack, mock.patch.object(files, "_AT_A_TIME", 1):
            for name in CALLS:
                stack.enter_context(mock.patch.object(fs, name, fail(getattr(fs, name))))
            try:
                publish(target, from_=source)
                lengths.append("done" if fail.left >= 0 else "published")
            except OSError:
                lengths.append("failed")
        if direction == "up":
            publish(tmp_path / "check", from_=url)  # what is published is whole
            shutil.rmtree(tmp_path / "check")
        elif local.exists():
            assert not list(local.glob(".tmp-*"))
            assert not list_snapshots(local) or cli.main(["verify", str(local)]) == 0
        publish(target, from_=source)
        where = local
        if direction == "up":
            publish(local, from_=url)
        assert answers(Reader(where)) == answers(Reader(trainer.path))
    assert len(lengths) > 15


def test_damage_in_a_store(tmp_path):
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1, 2, 3})
    url = f"memory://{os.urandom(6).hex()}"
    publish(url, from_=trainer.path)
    trainer.do("delta", {2})
    publish(url, from_=trainer.path)
    fs, root = fsspec.core.url_to_fs(url)
    (file,) = (each for each in fs.find(root) if "delta" in each and "vectors" in each)
    content = fs.cat_file(file)
    fs.pipe_file(file, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataLossError, match=rf"{url}/.*/000\.r0\.vectors\.npy is damaged"):
        publish(tmp_path / "local", from_=url)
    assert [name.kind for name in list_snapshots(tmp_path / "local")] == ["base"]
    assert not list((tmp_path / "local").glob(".tmp-*"))
    fs.pipe_file(file, content)
    publish(tmp_path / "local", from_=url)
    assert answers(Reader(tmp_path / "local")) == answers(Reader(trainer.path))
    trainer.do("delta", {3})
    local = Chain.open(trainer.path).last.directory / "000.r0.vectors.npy"
    sound = local.read_bytes()
    local.write_bytes(flipped(sound, len(sound) - 1))
    before = objects(url)
    with pytest.raises(DataLossError, match=str(local)):
        publish(url, from_=trainer.path)
    assert objects(url) == before
    local.write_bytes(sound)
    publish(url, from_=trainer.path)
    publish(tmp_path / "local", from_=url)
    # A directory whose number is not published is not read, and may be what another process writes.
    strays = [f"{Name(number, 'delta', 'ab' * 16)}.{'cd' * 8}" for number in (4, 9)]
    for stray in strays:
        fs.pipe_file(f"{root}/{stray}/MANIFEST.json", b"half")
    assert publish(tmp_path / "local", from_=url) == []
    for there in (strays, strays[1:]):
        trainer.do("delta", {2})
        publish(url, from_=trainer.path)
        publish(tmp_path / "local", from_=url)
        assert answers(Reader(tmp_path / "local")) == answers(Reader(trainer.path))
        assert [each for each in strays if fs.exists(f"{root}/{each}")] == there


def test_wrong_credentials_and_servers(capsys, tmp_path, s3, monkeypatch):
    """The error says what is wrong, and nothing is created."""
    url = "s3://nosuch1234/served"
    with pytest.raises(FileNotFoundError, match=f"{url} holds no snapshot, or does not exist"):
        publish(tmp_path / "local", from_=url)
    assert not (tmp_path / "local").exists()
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1})
    with pytest.raises(OSError, match=r"s3://nosuch1234/served/0000.*bucket does not exist"):
        publish(url, from_=trainer.path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    fsspec.filesystem("s3").clear_instance_cache()
    message = fails(capsys, 2, "publish", trainer.path, s3)
    assert message.startswith(f"error: {s3}")
    assert "credentials" in message
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.filesystem("s3").clear_instance_cache()
    message = fails(capsys, 2, "publish", s3, tmp_path / "local")
    assert message.startswith(f"error: {s3}")


class Cutting:
    """A proxy of a server that answers some requests with an error, or cuts their connection."""

    def __init__(self, server, every):
        host, port = server.removeprefix("http://").split(":")
        self._server, self._every, self._count = (host, int(port)), every, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.faults = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with contextlib.suppress(OSError), client:
            upstream = socket.create_connection(self._server)
            with upstream:
                threading.Thread(target=self._back, args=(upstream, client), daemon=True).start()
                while data := client.recv(1 << 16):
                    if data[:4] in (b"GET ", b"PUT ", b"POST", b"HEAD", b"DELE"):
                        self._count += 1
                        if self._count % self._every == 0:
                            self.faults += 1
                            if self._count // self._every % 2:
                                client.sendall(
                                    b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n"
                                    b"Connection: close\r\n\r\n"
                                )
                            return  # cuts the connection
                    upstream.sendall(data)

    def _back(self, upstream, client):
        with contextlib.suppress(OSError):
            while data := upstream.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


def test_errors_that_pass(tmp_path, s3, s3_server, monkeypatch):
    """The library tries again."""
    proxy = Cutting(s3_server, every=7)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    fsspec.filesystem("s3").clear_instance_cache()
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", {1, 2, 3})
    for key in range(4, 8):
        trainer.do("delta", {key})
        publish(s3, from_=trainer.path)
        publish(tmp_path / "local", from_=s3)
        assert answers(Reader(tmp_path / "local")) == answers(Reader(trainer.path))
    proxy.close()
    assert proxy.faults > 5


@pytest.mark.slow
def test_writers_that_are_killed(tmp_path, s3):
    """At any moment: what is published is whole, and the next call goes on."""
    trainer = Trainer(tmp_path / "chain")
    trainer.do("base", set(range(20)))
    rng = np.random.default_rng(0)
    killed = 0
    for step in range(14):
        trainer.do("base" if step % 5 == 4 else "delta", {int(rng.integers(0, 20))})
        process = subprocess.Popen([sys.executable, "-c", PUBLISH, s3, str(trainer.path)])
        time.sleep(float(rng.uniform(0.5, 2.0)))
        killed += process.poll() is None
        process.kill()
        process.wait()
        if Store(s3).snapshots():
            publish(tmp_path / "check", from_=s3)
            assert cli.main(["verify", str(tmp_path / "check")]) == 0
    publish(s3, from_=trainer.path)
    publish(tmp_path / "check", from_=s3)
    assert answers(Reader(tmp_path / "check")) == answers(Reader(trainer.path))
    assert killed
