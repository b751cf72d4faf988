"""The REST protocols: KServe's V1, which is TensorFlow Serving's, and V2, and metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import fastapi
import orjson
from fastapi import Request, Response
from grpc import StatusCode
from grpc_interceptor import exceptions
from kserve import errors
from kserve.protocol.rest.v1_endpoints import V1Endpoints
from kserve.protocol.rest.v2_datamodels import (
    ListModelsResponse,
    ModelMetadataResponse,
    ModelReadyResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
)
from kserve.protocol.rest.v2_endpoints import V2Endpoints
from prometheus_client import REGISTRY, exposition
from starlette.exceptions import HTTPException

from tf_dynemb._version import __version__
from tf_dynemb.serve import metrics, nested, v2
from tf_dynemb.serve.dataplane import Admission, DataPlane, Repository
from tf_dynemb.serve.inputs import Tensor

LOG = logging.getLogger("tf_dynemb.serve")
_JSON_BYTES = "inference-header-content-length"
# What probes ask without a token.
_OPEN = ("/", "/v2/health/live", "/v2/health/ready")
_HTTP = {
    StatusCode.OK: 200,
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.FAILED_PRECONDITION: 412,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.INTERNAL: 500,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
_CODES = {number: code.name for code, number in _HTTP.items()} | {
    408: StatusCode.DEADLINE_EXCEEDED.name,
    413: StatusCode.RESOURCE_EXHAUSTED.name,
}

_INFERENCE = re.compile(
    "/v1/models/(?P<v1>[^/:]+)(/versions/(?P<v1v>[^/:]+))?(?P<predict>:predict)"
    "|/v2/models/(?P<v2>[^/]+)(/versions/(?P<v2v>[^/]+))?/infer"
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class App:
    """The application (ASGI).

    It answers requests to models itself, because a web framework would take as long as a small
    model. FastAPI answers the rest, and describes all.

    Args:
        repository: the models.
        dataplane: KServe's answers about them.
        admission: which requests are let in.
        max_bytes: the most bytes of the body of a request.
        seconds: the longest time in which a body arrives.
    """

    def __init__(
        self,
        repository: Repository,
        dataplane: DataPlane,
        admission: Admission,
        max_bytes: int,
        seconds: float,
    ) -> None:
        self._repository, self._admission = repository, admission
        self._max_bytes, self._seconds = max_bytes, seconds
        self._others = _others(repository, dataplane)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        path, headers = str(scope["path"]), _headers(scope)
        found = _INFERENCE.fullmatch(path) if scope["method"] == "POST" else None
        began, body = time.perf_counter(), None
        try:
            if path in _OPEN:
                _check_probe(str(scope["method"]))
            else:
                self._admission.check(headers.get("authorization"))
            with self._admission.reading():
                body = await self._body(headers, receive)
            if found is None:
                await self._other(scope, receive, send)  # which reads no body
                return
            began = time.perf_counter()
            with self._admission.admitted():
                answer = await self._infer(found, body, headers)
        except Exception as error:
            answer = _failure(error)
        if body is None:  # nobody reads what may come of it
            answer.headers["connection"] = "close"
        await answer.send(send)
        if found is not None:
            self._count(found, answer.status, time.perf_counter() - began)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers another request. FastAPI raises what it has answered by 500."""
        has_begun = False

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._others(scope, receive, noted)
        except Exception as error:
            if not has_begun:
                raise
            LOG.error("a request failed", exc_info=error)

    async def _infer(self, found: re.Match[str], body: bytes, headers: dict[str, str]) -> _Answer:
        """Answers a request to a model."""
        is_v1 = found["predict"] is not None
        name, version = found["v1" if is_v1 else "v2"], found["v1v" if is_v1 else "v2v"]
        model = self._repository.named(name, version)
        answered: dict[str, str] = {}
        if is_v1:
            given = await model.predict(_json(body), headers, answered)
            return _Answer(200, orjson.dumps(given, option=orjson.OPT_SERIALIZE_NUMPY), answered)
        length = headers.get(_JSON_BYTES, str(len(body)))
        if not re.fullmatch("[0-9]{1,18}", length) or int(length) > len(body):
            raise exceptions.InvalidArgument(f"{_JSON_BYTES} is {length[:20]!r}.")
        try:
            request = v2.parse(body, int(length), model.name)
        except ValueError as error:
            raise exceptions.InvalidArgument(str(error)) from None
        text, json_bytes = v2.to_rest(await model.predict(request, headers, answered))
        if json_bytes is not None:
            answered[_JSON_BYTES] = str(json_bytes)
            answered["content-type"] = "application/octet-stream"
        return _Answer(200, text, answered)

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes:
        """Returns the body of a request; raises _RefusedError if it is too large or too slow."""
        length = headers.get("content-length", "0")
        if not re.fullmatch("[0-9]{1,18}", length) or int(length) > self._max_bytes:
            raise _RefusedError(413, f"the request has more than {self._max_bytes} bytes.")
        late = _RefusedError(408, f"the request did not arrive in {self._seconds:g} s.")
        if sys.version_info < (3, 11):
            try:
                return await asyncio.wait_for(self._received(receive), self._seconds)
            except asyncio.TimeoutError:
                raise late from None
        try:
            async with asyncio.timeout(self._seconds):  # makes no task, as wait_for does
                return await self._received(receive)
        except TimeoutError:
            raise late from None

    async def _received(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise _RefusedError(413, f"the request has more than {self._max_bytes} bytes.")
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                return b"".join(parts)

    def _count(self, found: re.Match[str], status: int, seconds: float) -> None:
        is_v1 = found["predict"] is not None
        name = found["v1" if is_v1 else "v2"]
        model = name if name in self._repository.models else ""
        protocol = "v1" if is_v1 else "v2"
        metrics.REQUESTS.labels(model, protocol, _CODES.get(status, "UNKNOWN")).inc()
        metrics.REQUEST_SECONDS.labels(model, protocol).observe(seconds)


def _check_probe(method: str) -> None:
    if method not in ("GET", "HEAD"):
        raise _RefusedError(405, "ask by GET.")


class _Answer:
    """A response with a status, a body and headers."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.status, self.body = status, body
        self.headers = {"content-type": "application/json", **headers}

    async def send(self, send: Send) -> None:
        """Sends it."""
        named = {**self.headers, "content-length": str(len(self.body))}
        headers = [(name.encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


class _RefusedError(Exception):
    """A request is not read."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _json(body: bytes) -> Any:
    try:
        return nested.parse(body)
    except ValueError as error:
        raise exceptions.InvalidArgument(str(error)) from None


def _failure(error: Exception) -> _Answer:
    """Returns an error as an answer."""
    text, status, headers = str(error), 500, {}
    if isinstance(error, exceptions.GrpcException):
        text, status = error.details, _HTTP.get(error.status_code, 500)
    elif isinstance(error, _RefusedError):
        status = error.status
    elif isinstance(error, (errors.ModelNotReady, errors.ServerNotReady)):
        status = 503
    elif isinstance(error, errors.InvalidInput):
        status = 400
    elif isinstance(error, HTTPException):
        text, status = error.detail, error.status_code
    else:
        LOG.error("a request failed", exc_info=error)
        text = type(error).__name__
    if status in (429, 503):
        headers["retry-after"] = "1"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return _Answer(status, orjson.dumps({"error": text}), headers)


def _others(repository: Repository, dataplane: DataPlane) -> fastapi.FastAPI:
    """Returns what answers everything but requests to models."""
    app = fastapi.FastAPI(title="tf_dynemb", version=__version__, docs_url=None, redoc_url=None)
    endpoints = _Endpoints(repository, dataplane)
    app.include_router(endpoints.v1())
    app.include_router(endpoints.v2())
    app.add_exception_handler(Exception, _failed)
    app.add_api_route("/", dataplane.live, tags=["health"])
    app.add_api_route("/metrics", _metrics, response_class=Response, tags=["health"])
    for kind in (
        exceptions.GrpcException,
        errors.ModelNotReady,
        errors.ServerNotReady,
        HTTPException,
    ):
        app.add_exception_handler(kind, _failed)
    described = app.openapi()
    responses = {**_OK, **{str(status): each for status, each in _errors().items()}}
    for path, has in _INFERENCE_PATHS.items():
        described["paths"][path] = {"post": {**has, "responses": responses}}
    app.openapi_schema = described
    return app


async def _failed(request: Request, error: Exception) -> Response:
    answer = _failure(error)
    return Response(answer.body, answer.status, answer.headers)


class _Endpoints:
    """What the other paths of both protocols do."""

    def __init__(self, repository: Repository, dataplane: DataPlane) -> None:
        self._repository = repository
        self._kserve_v1 = V1Endpoints(dataplane)
        self._kserve_v2 = V2Endpoints(dataplane)

    def v1(self) -> fastapi.APIRouter:
        """Returns the paths of V1."""
        router = fastapi.APIRouter(prefix="/v1/models", tags=["V1"], responses=_errors())
        router.add_api_route("", self._kserve_v1.models)
        for path in ("/{model_name}", "/{model_name}/versions/{model_version}"):
            router.add_api_route(f"{path}/metadata", self._signatures)
            router.add_api_route(path, self._state)
        return router

    def v2(self) -> fastapi.APIRouter:
        """Returns the paths of V2."""
        kserve = self._kserve_v2
        router = fastapi.APIRouter(prefix="/v2", tags=["V2"], responses=_errors())
        router.add_api_route("", kserve.metadata, response_model=ServerMetadataResponse)
        router.add_api_route("/health/live", kserve.live, response_model=ServerLiveResponse)
        router.add_api_route("/health/ready", kserve.ready, response_model=ServerReadyResponse)
        router.add_api_route("/models", kserve.models, response_model=ListModelsResponse)
        for path in ("/models/{model_name}", "/models/{model_name}/versions/{model_version}"):
            router.add_api_route(f"{path}/ready", self._ready, response_model=ModelReadyResponse)
            router.add_api_route(
                path,
                self._described,
                response_model=ModelMetadataResponse,
                response_model_exclude_none=True,
            )
        control = "/repository/models/{model_name}"
        router.add_api_route(f"{control}/load", self._load, methods=["POST"])
        router.add_api_route(f"{control}/unload", self._unload, methods=["POST"])
        return router

    async def _state(self, model_name: str, model_version: str | None = None) -> Response:
        model = self._repository.named(model_name, model_version)
        states = [_state("AVAILABLE", model.version or "1")] if model.loaded else []
        states += [_state("START", name or "1", why) for name, why in model.failures.items()]
        found: dict[str, Any] = {"name": model_name, "ready": model.loaded is not None}
        found["model_version_status"] = states
        if (mark := model.watermark()).id:
            found["watermark"] = {"watermark": mark.watermark, "id": mark.id, "utc_ns": mark.utc_ns}
            found["follow_error"] = mark.error
        status = 200 if model.loaded else 503
        return Response(orjson.dumps(found), status, media_type="application/json")

    async def _signatures(
        self, model_name: str, model_version: str | None = None
    ) -> dict[str, Any]:
        model = self._repository.named(model_name, model_version)
        if model.loaded is None:
            raise exceptions.Unavailable(f"model {model_name!r} is not loaded.")
        described = {
            name: {
                "inputs": _tensors([t for each in signature.inputs.values() for t in each.tensors]),
                "outputs": _tensors(signature.outputs),
                "method_name": "tensorflow/serving/predict",
            }
            for name, signature in model.loaded.signatures.items()
        }
        spec = {"name": model_name, "signature_name": "", "version": model.version or "1"}
        return {
            "model_spec": spec,
            "metadata": {"signature_def": {"signature_def": described}},
        }

    async def _described(self, model_name: str, model_version: str | None = None) -> Any:
        self._repository.named(model_name, model_version)
        return await self._kserve_v2.model_metadata(model_name)

    async def _ready(self, model_name: str, model_version: str | None = None) -> Any:
        self._repository.named(model_name, model_version)
        return await self._kserve_v2.model_ready(model_name)

    async def _load(self, model_name: str) -> dict[str, Any]:
        await self._repository.load(model_name)
        return {"name": model_name, "load": True}

    async def _unload(self, model_name: str) -> dict[str, Any]:
        await self._repository.unload(model_name)
        return {"name": model_name, "unload": True}


async def _metrics(request: Request) -> Response:
    encode, kind = exposition.choose_encoder(request.headers.get("accept", ""))
    text = await asyncio.to_thread(encode, REGISTRY)
    return Response(text, headers={"content-type": kind})


def _state(state: str, version: str, error: str = "") -> dict[str, Any]:
    status = {"error_code": "UNKNOWN" if error else "OK", "error_message": error}
    return {"version": version, "state": state, "status": status}


def _tensors(tensors: Any) -> dict[str, Any]:
    """Returns tensors as TensorFlow Serving describes them."""
    found = {}
    for each in tensors:
        assert isinstance(each, Tensor)
        dims = [{"size": str(-1 if d is None else d), "name": ""} for d in each.shape or ()]
        shape = {"dim": dims, "unknown_rank": each.shape is None}
        found[each.name] = {"dtype": each.type_name, "tensor_shape": shape, "name": each.name}
    return found


def _errors() -> dict[int | str, dict[str, Any]]:
    text = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    content = {"application/json": {"schema": text}}
    return {
        status: {"description": "error", "content": content}
        for status in (400, 401, 403, 404, 405, 408, 412, 413, 429, 500, 501, 503, 504)
    }


def _inference(body: dict[str, Any], tag: str, *parameters: str) -> dict[str, Any]:
    return {
        "tags": [tag],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
    }


_OK = {"200": {"description": "the answer", "content": {"application/json": {"schema": {}}}}}
_V1_BODY = {
    "type": "object",
    "properties": {
        "signature_name": {"type": "string"},
        "instances": {"type": "array", "items": {}, "minItems": 1},
        "inputs": {},
    },
    "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    "example": {"instances": [{"users": [1], "items": [2]}]},
}
_V2_TENSOR = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string"},
        "parameters": {"type": "object"},
        "data": {"type": "array", "items": {}},
    },
    "required": ["name", "shape", "datatype", "data"],
}
_V2_BODY = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "inputs": {"type": "array", "items": _V2_TENSOR},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
                "required": ["name"],
            },
        },
    },
    "required": ["inputs"],
}
_V1_PATH, _V2_PATH = "/v1/models/{model_name}", "/v2/models/{model_name}"
_VERSION = "/versions/{model_version}"
_NAMES = ("model_name", "model_version")
_INFERENCE_PATHS = {
    f"{_V1_PATH}:predict": _inference(_V1_BODY, "V1", _NAMES[0]),
    f"{_V1_PATH}{_VERSION}:predict": _inference(_V1_BODY, "V1", *_NAMES),
    f"{_V2_PATH}/infer": _inference(_V2_BODY, "V2", _NAMES[0]),
    f"{_V2_PATH}{_VERSION}/infer": _inference(_V2_BODY, "V2", *_NAMES),
}
