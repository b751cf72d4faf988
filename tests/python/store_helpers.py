"""Object stores for tests: an S3 server, and what is in them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import boto3
import fsspec
import pytest

BUCKET = "snapshots"

# A program: publish to a URL from a path.
PUBLISH = """
import sys, tf_dynemb.chains.publish as p
p.publish(sys.argv[1], from_=sys.argv[2])
"""


# A program: an S3 server, until its standard input ends. It prints its URL.
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A context with an S3 server in another process, whose URL it yields."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def empty_folder(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a server the one of `s3://`; returns the URL of an empty folder in a bucket."""
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=BUCKET)
    fsspec.filesystem("s3").clear_instance_cache()
    return f"s3://{BUCKET}/{os.urandom(6).hex()}/served"


def objects(url: str) -> list[str]:
    """Returns the names of the objects below a URL."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(place.removeprefix(root + "/") for place in fs.find(root))
