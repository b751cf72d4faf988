"""A model that a server answers for: its versions, the snapshots it follows, and its answers."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import gc
import logging
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import kserve
import tensorflow as tf
from grpc_interceptor import exceptions

from tf_dynemb._presence import is_url
from tf_dynemb.chains.publish import publish
from tf_dynemb.serve import metrics, v1, v2
from tf_dynemb.serve.batches import Batches
from tf_dynemb.serve.inputs import Value
from tf_dynemb.serve.loaded_model import DEFAULT, LoadedModel, Watermark, message_of
from tf_dynemb.serve.sources import Version, source_of
from tf_dynemb.serve.traces import Stages, Traces
from tf_dynemb.storage import DataLossError

LOG = logging.getLogger("tf_dynemb.serve")
MIN_WATERMARK = "x-min-watermark"
# The requests that a new version is warmed with: the last ones, none of them larger.
_RECORDED, _RECORDED_BYTES = 16, 256 * 1024
_WARM_UP_ROWS = (1, 16, 256)
# The seconds until a version that could not be loaded is tried again: the first and the longest.
_RETRY = 1.0, 60.0

# A request that is decoded in a thread.
_LARGE_BYTES = 128 * 1024
# How often a new version looks for snapshots that the one before has applied meanwhile.
_CATCH_UPS = 10

_T = TypeVar("_T")


class Limits(NamedTuple):
    """What a request may be.

    Attributes:
        rows: the most rows of a request, and of a batch of several requests.
        elements: the most elements of all inputs of a request together.
        seconds: the longest time until its answer.
    """

    rows: int
    elements: int
    seconds: float


class _Live:
    """A version that is loaded."""

    def __init__(
        self, version: Version, path: pathlib.Path, model: LoadedModel, batches: dict[str, Batches]
    ) -> None:
        self.version, self.path, self.model, self.batches = version, path, model, batches
        self.requests = 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """A context in which a request uses the version, so that it does not end."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @property
    def is_idle(self) -> bool:
        """Whether nothing uses it: no request, and no call whose requests have given up."""
        return not self.requests and all(each.is_idle for each in self.batches.values())


class Model(kserve.Model):  # type: ignore[misc]
    """A served model.

    Requests are answered by the newest version that could be loaded. Another one is loaded and
    warmed while the one before answers, and takes its place between two requests. The one before
    ends when its last request is answered.

    Args:
        name: the name in requests.
        place: the path or URL of a SavedModel, or of a directory of numbered ones.
        cache: a directory for copies of what is at URLs.
        pool: the threads that call models.
        threads: their number.
        limits: what a request may be.
        follow: a path or URL of snapshots to apply, besides those that the model follows itself.
        joins: whether requests can be one batch; None: they are if calls with random rows, alone
            and together, have the same outputs.
        traces: where spans of requests go.
        residence: the device of the tables; arguments of `load_saved_model`.
    """

    def __init__(
        self,
        name: str,
        place: str,
        cache: pathlib.Path,
        pool: concurrent.futures.Executor,
        threads: int,
        limits: Limits,
        follow: str | None = None,
        joins: bool | None = None,
        traces: Traces | None = None,
        residence: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name, return_response_headers=True)
        self._residence = dict(residence or {})
        self._source = source_of(place, cache / "models" / name)
        self._place, self._follow_place, self._traces = place, follow, traces
        self._copy = cache / "chains" / name
        self._pool, self._threads, self._limits, self._joins = pool, threads, limits, joins
        # Loads and follows, one after the other.
        self._background = concurrent.futures.ThreadPoolExecutor(1, f"load {name}")
        self._live: _Live | None = None
        self._recorded: collections.deque[tuple[str, dict[str, Value]]] = collections.deque(
            maxlen=_RECORDED
        )
        self._failed: dict[Version, tuple[float, float, str]] = {}
        self._follow_error = self._list_error = ""
        self._is_unloaded = False
        self._refreshing = asyncio.Lock()
        for counter in (metrics.VERSIONS_LOADED, metrics.VERSIONS_FAILED):
            counter.labels(name)  # 0 is there before the first one
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def loaded(self) -> LoadedModel | None:
        """The model that answers now."""
        live = self._live  # once: threads of scrapes read it, too
        return None if live is None else live.model

    @property
    def version(self) -> str:
        """The version that answers now; empty: it has no number, or there is none."""
        live = self._live
        return "" if live is None else live.version.name

    @property
    def place(self) -> str:
        """The path or URL that it is loaded from."""
        return self._place

    @property
    def is_unloaded(self) -> bool:
        """Whether a client has unloaded it."""
        return self._is_unloaded

    def watermark(self) -> Watermark:
        """Returns the snapshot that answers come from, and why the next one cannot be applied."""
        loaded = self.loaded
        mark = Watermark() if loaded is None else loaded.watermark()
        return mark._replace(error=self._follow_error or mark.error)

    @property
    def failures(self) -> dict[str, str]:
        """The versions that could not be loaded, and why; under "", why there are none."""
        listed = {"": self._list_error} if self._list_error else {}
        return {**listed, **{each.name: why for each, (_, _, why) in self._failed.items()}}

    async def healthy(self) -> bool:
        """Returns whether the model can answer. One that cannot apply a snapshot still can."""
        return self._live is not None

    def load(self) -> bool:
        """Lets an unloaded model be loaded again, by the next `refresh`."""
        self._is_unloaded = False
        return self._live is not None

    def start(self) -> None:
        """Does nothing: `refresh` loads the model."""

    def stop(self) -> None:
        """Unloads the model, until `load`."""
        self._is_unloaded = True
        self._replace(None)

    async def refresh(self) -> None:
        """Loads a version that is newer than the one that answers, and applies new snapshots.

        A failure is logged and reported. The model then goes on as before.
        """
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            versions = await self._in_background(self._source.versions)
            self._list_error = ""
        except Exception as error:  # such as a store that does not answer
            if str(error) != self._list_error:
                self._warn(f"cannot list {self._place}", error)
            self._list_error = str(error) or type(error).__name__
            versions = []
        now = time.monotonic()
        self._failed = {v: at for v, at in self._failed.items() if v in versions}
        for version in versions:
            if self._is_unloaded or (self._live is not None and version == self._live.version):
                break
            is_due = version not in self._failed or self._failed[version][0] <= now
            if is_due and await self._try(version):
                break
        if self._live is not None and self._follow_place is not None:
            await self._in_background(self._follow, self._live.model)

    async def close(self) -> None:
        """Waits until the requests that have come are answered, and unloads the model."""
        self.stop()
        await asyncio.gather(*self._ending)
        self._background.shutdown(wait=False, cancel_futures=True)

    def get_input_types(self) -> list[dict[str, Any]]:
        """Returns the inputs, as the metadata of a model has them."""
        signature = self._signature(self._serving(), DEFAULT)[1]
        parts = [part for each in signature.inputs.values() for part in each.parts.items()]
        return [v2.described(tensor, name) for name, tensor in parts]

    def get_output_types(self) -> list[dict[str, Any]]:
        """Returns the outputs, as the metadata of a model has them."""
        signature = self._signature(self._serving(), DEFAULT)[1]
        return [v2.described(tensor, tensor.name) for tensor in signature.outputs]

    async def predict(
        self,
        payload: Any,
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> Any:
        """Answers a request.

        Args:
            payload: a `kserve.InferRequest`, or the body of a request to `:predict`.
            headers: of the request.
            response_headers: gets the version and the watermark of the answer.

        Raises:
            exceptions.GrpcException: there is no answer, with gRPC's status.
        """
        if self._traces is None:
            return (await self._predict(payload, headers or {}, response_headers))[0]
        began, stages, failure = time.time_ns(), None, None
        answered: dict[str, str] = {} if response_headers is None else response_headers
        try:
            found, stages = await self._predict(payload, headers or {}, answered)
            return found
        except Exception as error:
            failure = error
            raise
        finally:
            named = {"model": self.name, **answered}
            self._traces.note(headers or {}, began, time.time_ns(), named, stages, failure)

    async def _predict(
        self, payload: Any, headers: dict[str, str], response_headers: dict[str, str] | None
    ) -> tuple[Any, Stages]:
        """Returns the answer to a request, and what it has waited for."""
        live = self._serving()
        with live.used():
            return await self._answer(live, payload, headers, response_headers)

    async def _answer(
        self,
        live: _Live,
        payload: Any,
        headers: dict[str, str],
        response_headers: dict[str, str] | None,
    ) -> tuple[Any, Stages]:
        """Returns the answer of a version."""
        least = _least(headers)
        is_v2 = isinstance(payload, kserve.InferRequest)
        name, signature = self._signature(live, None if is_v2 else _signature_of(payload))
        decode = functools.partial((v2 if is_v2 else v1).decode, payload, signature.inputs)
        try:
            if _size(payload, headers) > _LARGE_BYTES:
                # In a thread: probes, and other requests, are answered meanwhile.
                values = await asyncio.get_running_loop().run_in_executor(self._pool, decode)
            else:
                values = decode()
            rows = self._checked(signature, values)
        except ValueError as error:
            raise exceptions.InvalidArgument(str(error)) from None
        answer = await live.batches[name].answer(values, rows, self._limits.seconds)
        self._record(name, values)
        mark = answer.watermark
        if least is not None and mark.watermark < least:
            raise exceptions.FailedPrecondition(
                f"model {self.name!r} is at watermark {mark.watermark}, before {least}."
            )
        if response_headers is not None:
            response_headers.update(_headers(live.version.name, mark))
        try:
            if not is_v2:
                return v1.encode(payload, answer.outputs), answer.stages
            parameters = _parameters(mark)
            found = v2.encode(payload, answer.outputs, live.version.name, parameters)
            return found, answer.stages
        except ValueError as error:
            raise exceptions.InvalidArgument(str(error)) from None

    def _serving(self) -> _Live:
        if self._live is None:
            raise exceptions.Unavailable(f"model {self.name!r} is not loaded.")
        return self._live

    def _signature(self, live: _Live, name: str | None) -> tuple[str, Any]:
        signatures = live.model.signatures
        if name is None or (name == DEFAULT and name not in signatures):
            name = live.model.default
        if name not in signatures:
            known = ", ".join(sorted(signatures))
            raise exceptions.InvalidArgument(f"there is no signature {name!r}: {known}.")
        return name, signatures[name]

    def _checked(self, signature: Any, values: dict[str, Value]) -> int:
        """Returns the rows of a request; raises ValueError if it is too large or has none."""
        rows = signature.rows(values)
        if rows is not None and not 0 < rows <= self._limits.rows:
            raise ValueError(f"the request has {rows} rows; it can have 1 to {self._limits.rows}.")
        elements = sum(part.size for value in values.values() for part in value)
        if elements > self._limits.elements:
            raise ValueError(
                f"the request has {elements} elements, more than {self._limits.elements}."
            )
        return rows or 1

    def _record(self, signature: str, values: dict[str, Value]) -> None:
        if sum(part.nbytes for value in values.values() for part in value) <= _RECORDED_BYTES:
            self._recorded.append((signature, values))

    async def _in_background(self, function: Callable[..., _T], *arguments: Any) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._background, functools.partial(function, *arguments))

    async def _try(self, version: Version) -> bool:
        """Loads a version, and lets it answer; returns whether it could be loaded."""
        label = f"version {version.name}" if version.name else version.place
        began = time.monotonic()
        try:
            live = await self._in_background(self._load, version)
        except Exception as error:
            _, delay, said = self._failed.get(version, (0.0, _RETRY[0] / 2, ""))
            delay = min(2 * delay, _RETRY[1])
            if message_of(error) != said:
                self._warn(f"cannot load {label}", error)
            self._failed[version] = time.monotonic() + delay, delay, message_of(error)
            metrics.VERSIONS_FAILED.labels(self.name).inc()
            return False
        await self._catch_up(live.model)
        if self._is_unloaded:
            self._source.release(live.path)
            return True
        self._failed.pop(version, None)
        LOG.info(
            "model %s: %s answers, loaded in %.1f s", self.name, label, time.monotonic() - began
        )
        metrics.VERSIONS_LOADED.labels(self.name).inc()
        self._replace(live)
        return True

    async def _catch_up(self, model: LoadedModel) -> None:
        """Lets a new version apply what the one before has, so that answers do not go back."""
        for _ in range(_CATCH_UPS):
            if self._live is None:
                return
            if model.watermark().watermark >= self._live.model.watermark().watermark:
                return
            try:
                await self._in_background(model.catch_up)
            except (tf.errors.OpError, OSError, ValueError) as error:  # its polls report it
                LOG.warning("model %s: a new version is behind: %s", self.name, error)
                return

    def _load(self, version: Version) -> _Live:
        path = self._source.fetch(version)
        try:
            model = LoadedModel(path, **self._residence)
            if self._follow_place is not None:
                self._follow(model)
            self._warm_up(model)
        except BaseException:
            self._source.release(path)
            raise
        batches = {
            name: Batches(
                signature,
                self._pool,
                self._threads,
                self._limits.rows,
                functools.partial(metrics.timed, self.name),
            )
            for name, signature in model.signatures.items()
        }
        return _Live(version, path, model, batches)

    def _warm_up(self, model: LoadedModel) -> None:
        """Traces and allocates, and touches what requests have touched."""
        known = model.known_keys()
        for name, signature in model.signatures.items():
            why = signature.try_joining(known)
            if self._joins is not None:
                signature.joins = self._joins
            elif why:
                LOG.warning("model %s, %s: each request is a batch: %s.", self.name, name, why)
            requests = [values for recorded, values in list(self._recorded) if recorded == name]
            if not why:
                requests += [signature.example(rows) for rows in _WARM_UP_ROWS]
            for values in requests:
                if {n: len(v) for n, v in values.items()} == {
                    n: len(each.tensors) for n, each in signature.inputs.items()
                }:
                    try:
                        signature(values)
                    except (tf.errors.OpError, ValueError, TypeError) as error:
                        LOG.warning("model %s, %s: warm-up: %s", self.name, name, error)

    def _follow(self, model: LoadedModel) -> None:
        """Applies the snapshots at the path or URL that the server follows for the model."""
        place = str(self._follow_place)
        try:
            if is_url(place):
                self._copy.parent.mkdir(parents=True, exist_ok=True)
                publish(self._copy, from_=place)
                place = str(self._copy)
            model.apply(place)
            error = ""
        except (DataLossError, OSError, RuntimeError, ValueError, tf.errors.OpError) as caught:
            error = message_of(caught)
        if error and error != self._follow_error:
            LOG.warning("model %s cannot follow %s: %s", self.name, self._follow_place, error)
        self._follow_error = error

    def _replace(self, live: _Live | None) -> None:
        before, self._live = self._live, live
        if before is not None:
            task = asyncio.get_running_loop().create_task(self._end(before))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end(self, live: _Live) -> None:
        while not live.is_idle:
            await asyncio.sleep(0.02)
        path = live.path
        live.batches.clear()
        del live
        # A SavedModel in memory has cycles, and is large.
        await self._in_background(gc.collect)
        self._source.release(path)

    def _warn(self, what: str, error: Exception) -> None:
        LOG.warning("model %s: %s: %s", self.name, what, message_of(error) or type(error).__name__)


def _signature_of(body: Any) -> str | None:
    name = body.get("signature_name") if isinstance(body, Mapping) else None
    if not isinstance(name, (str, type(None))):
        raise exceptions.InvalidArgument("signature_name is a string.")
    return name or None


def _size(payload: Any, headers: Mapping[str, str]) -> int:
    """Returns about how many bytes a request has."""
    if "content-length" in headers or not isinstance(payload, kserve.InferRequest):
        return int(headers.get("content-length", _LARGE_BYTES + 1))
    return sum(len(each._raw_data or each.data or ()) for each in payload.inputs)


def _least(headers: Mapping[str, str]) -> int | None:
    text = headers.get(MIN_WATERMARK)
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise exceptions.InvalidArgument(f"{MIN_WATERMARK} is not an integer: {text[:40]!r}.")
    return int(text)


def _headers(version: str, mark: Watermark) -> dict[str, str]:
    found = {"x-model-version": version} if version else {}
    if mark.id:
        found["x-watermark"] = str(mark.watermark)
        found["x-watermark-id"] = mark.id
        found["x-watermark-utc-ns"] = str(mark.utc_ns)
    return found


def _parameters(mark: Watermark) -> dict[str, str | int]:
    if not mark.id:
        return {}
    named = {"watermark": mark.watermark, "watermark_utc_ns": mark.utc_ns}
    return {**named, "watermark_id": mark.id}
