"""The process: its ports, its models, and its end."""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import fcntl
import gc
import logging
import pathlib
import signal
import socket
import tempfile
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc
import tensorflow as tf
import uvicorn
from prometheus_client import REGISTRY
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tf_dynemb._presence import remove_tree
from tf_dynemb.parallel.placement import existing_device
from tf_dynemb.serve import metrics
from tf_dynemb.serve.dataplane import Admission, DataPlane, Repository
from tf_dynemb.serve.model import Limits, Model
from tf_dynemb.serve.rest import App
from tf_dynemb.serve.rpc import create_server
from tf_dynemb.serve.traces import Traces

LOG = logging.getLogger("tf_dynemb.serve")
# After the drain: for requests that are still being answered.
_GRACE_SECONDS = 30


_HEADER_BYTES = 64 * 1024
# Requests of a connection that wait for the answer to the one before.
_PIPELINE = 64


class ServerError(Exception):
    """The server cannot start."""


async def serve(options: argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT.

    At one of these signals the server stops to be ready, and answers for `drain_seconds` more, in
    which load balancers find other servers. It then accepts no connections, answers the requests
    that it has, and returns. A second signal ends the wait.

    Args:
        options: as `tf_dynemb.serve.__main__.parse` returns them.

    Raises:
        ServerError: a port, a certificate or a token cannot be used, or a model not be loaded.
    """
    ended, hurried, draining = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        (hurried if ended.is_set() else ended).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    with contextlib.ExitStack() as stack:
        cache = options.cache
        if cache is None:
            folder = tempfile.TemporaryDirectory(prefix="tf_dynemb_serve_")
            cache = pathlib.Path(stack.enter_context(folder))
        else:
            stack.enter_context(_taken(cache))
        pool = concurrent.futures.ThreadPoolExecutor(options.threads, "call")
        stack.callback(pool.shutdown, wait=False)
        try:
            traces = Traces.configured()
        except ImportError as error:
            raise ServerError(f"{error}: pip install 'tf_dynemb[traces]'") from error
        if traces is not None:
            stack.callback(traces.close)
        models = _models(options, cache, pool, traces)
        repository = Repository(models, options.model_control)
        dataplane = DataPlane(repository, draining.is_set)
        admission = Admission(options.max_requests, _token(options.token_file))
        collector = metrics.ModelsCollector(repository.models)
        REGISTRY.register(collector)
        stack.callback(REGISTRY.unregister, collector)
        limits = options.max_request_bytes, options.timeout_seconds
        app = App(repository, dataplane, admission, *limits)
        http, url = _http(options, app)
        rpc, address = None, None
        if options.grpc_port >= 0:
            rpc = create_server(repository, dataplane, admission, options.max_request_bytes)
            address = _listen(rpc, options)
            await rpc.start()
        listening = loop.create_task(http())
        try:
            # What is there now stays: later collections, of models that have ended, are short.
            gc.collect()
            gc.freeze()
            if not await _before(ended, _load(models)):
                return
            polls = [loop.create_task(_poll(model, options.poll_seconds)) for model in models]
            LOG.info("REST on %s, %s", url, f"gRPC on {address}" if address else "no gRPC")
            await ended.wait()
            LOG.info("draining for %g s", options.drain_seconds)
            draining.set()
            await _before(hurried, asyncio.sleep(options.drain_seconds))
            for poll in polls:
                poll.cancel()
        finally:
            if rpc is not None:
                await rpc.stop(_GRACE_SECONDS)
            http.end()
            await listening
            closing = asyncio.gather(*(model.close() for model in models))
            with contextlib.suppress(asyncio.TimeoutError):  # a call that does not end
                await asyncio.wait_for(closing, _GRACE_SECONDS)
    LOG.info("ended")


async def _load(models: list[Model]) -> None:
    for model in models:
        await model.refresh()
        if model.loaded is None:
            why = "; ".join(model.failures.values()) or f"there is no SavedModel at {model.place}"
            raise ServerError(f"model {model.name!r} cannot be loaded: {why}")


async def _before(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs something until an event; returns whether it has ended before."""
    running, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not running.done():
        running.cancel()
        return False
    running.result()
    return True


class _Http:
    """The HTTP server, with a socket that is bound already."""

    def __init__(self, app: Any, listener: socket.socket, options: argparse.Namespace) -> None:

        class Limited(_Protocol):
            seconds = options.timeout_seconds
            # With the sizes of chunks, and trailers.
            max_body_bytes = 4 * options.max_request_bytes + _HEADER_BYTES

        config = uvicorn.Config(
            app,
            http=Limited,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=65,  # longer than that of load balancers
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            ssl_keyfile_password="",  # so that nothing asks for one
        )
        config.load()
        self._server = _Server(config)
        self._listener = listener

    async def __call__(self) -> None:
        await self._server.serve(sockets=[self._listener])

    def end(self) -> None:
        """Ends the server after the requests that it has."""
        self._server.should_exit = True


class _Protocol(HttpToolsProtocol):
    """A connection whose headers have limits: `seconds` to arrive, and their number of bytes."""

    seconds: float
    max_body_bytes: int

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._body_bytes = 0
        self._header_bytes = 0  # of a request whose headers come; -1: its body does
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Reads data of the client."""
        if self._timer is None and self._header_bytes >= 0:
            self._timer = self.loop.call_later(self.seconds, self._close)
        if self._header_bytes >= 0:
            self._header_bytes += len(data)
        else:
            self._body_bytes += len(data)
        super().data_received(data)
        if (
            self._header_bytes > _HEADER_BYTES
            or self._body_bytes > self.max_body_bytes
            or len(self.pipeline) > _PIPELINE
        ):
            self._close()

    def connection_made(self, transport: Any) -> None:
        """Begins a connection."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.seconds, self._close)

    def connection_lost(self, error: Exception | None) -> None:
        """Ends a connection."""
        self._stop()
        super().connection_lost(error)

    def on_headers_complete(self) -> None:
        """Begins the body of a request, which `rest.App` limits."""
        self._stop()
        self._header_bytes, self._body_bytes = -1, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Ends a request; the headers of another one may come."""
        self._header_bytes, self._body_bytes = 0, 0
        super().on_message_complete()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._stop()
        self.transport.close()


class _Server(uvicorn.Server):
    """A server that leaves signals to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def _models(
    options: argparse.Namespace,
    cache: pathlib.Path,
    pool: concurrent.futures.Executor,
    traces: Traces | None,
) -> list[Model]:
    follow = dict(options.follow)
    limits = Limits(options.max_rows, options.max_elements, options.timeout_seconds)
    joins = {"auto": None, "on": True, "off": False}[options.batching]
    try:
        if options.device != "CPU":
            # Otherwise TensorFlow takes nearly all memory of the GPU, and none is left for tables.
            for gpu in tf.config.list_physical_devices("GPU"):
                tf.config.experimental.set_memory_growth(gpu, True)
        existing_device(options.device)
    except (RuntimeError, ValueError) as error:
        raise ServerError(f"--device: {error}") from error
    residence = {
        "device": options.device,
        "max_hbm_for_vectors": options.max_hbm_for_vectors,
    }
    try:
        return [
            Model(
                name,
                place,
                cache,
                pool,
                options.threads,
                limits,
                follow.get(name),
                joins,
                traces,
                residence,
            )
            for name, place in options.model
        ]
    except (ImportError, OSError, ValueError) as error:  # of a URL
        raise ServerError(f"--model: {error}") from error


@contextlib.contextmanager
def _taken(cache: pathlib.Path) -> Iterator[None]:
    """Takes a directory for copies, without the models that a killed server has left there."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / "lock").open("w")
    except OSError as error:
        raise ServerError(f"--cache: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError(f"--cache: another server uses {cache}") from None
        remove_tree(cache / "models")
        yield


def _token(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        token = pathlib.Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"--token-file: {error}") from error
    if not token:
        raise ServerError(f"--token-file: {file} is empty")
    return token


def _http(options: argparse.Namespace, app: Any) -> tuple[_Http, str]:
    """Returns the HTTP server and its URL."""
    host, port = options.host, options.http_port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Not create_server, whose sockets say no protocol: asyncio then lets TCP delay answers.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        raise ServerError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        server = _Http(app, listener, options)
    except OSError as error:
        listener.close()
        raise ServerError(f"--tls-cert, --tls-key: {error}") from error
    scheme = "https" if options.tls_cert else "http"
    shown = f"[{host}]" if ":" in host else host
    return server, f"{scheme}://{shown}:{listener.getsockname()[1]}"


def _listen(server: grpc.aio.Server, options: argparse.Namespace) -> str:
    """Opens the port of gRPC; returns its address."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{host}:{options.grpc_port}"
    try:
        if options.tls_cert:
            key, cert = (pathlib.Path(f).read_bytes() for f in (options.tls_key, options.tls_cert))
            credentials = grpc.ssl_server_credentials([(key, cert)])
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except (OSError, RuntimeError) as error:
        raise ServerError(f"cannot listen on {address}: {error}") from error
    return f"{host}:{port}"


async def _poll(model: Model, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await model.refresh()
        except Exception:  # of no version or snapshot, which are reported
            LOG.exception("model %s", model.name)
