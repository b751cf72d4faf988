"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc_interceptor import AsyncServerInterceptor, exceptions
from kserve import InferRequest, errors
from kserve.protocol.grpc import grpc_predict_v2_pb2 as messages
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import (
    add_GRPCInferenceServiceServicer_to_server,
)
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.utils.utils import to_headers

from tf_dynemb.serve import metrics
from tf_dynemb.serve.dataplane import Admission, DataPlane, Repository

LOG = logging.getLogger("tf_dynemb.serve")
# What probes ask without a token.
_OPEN = (
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)


def create_server(
    repository: Repository,
    dataplane: DataPlane,
    admission: Admission,
    max_bytes: int,
) -> grpc.aio.Server:
    """Returns the server, without a port.

    Args:
        repository: the models.
        dataplane: answers.
        admission: which requests are let in.
        max_bytes: the most bytes of a request.
    """
    server = grpc.aio.server(
        interceptors=(_Statuses(admission),),
        options=[
            ("grpc.max_receive_message_length", max_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a second server on the port is an error
        ],
    )
    service = _Service(repository, dataplane, admission)
    add_GRPCInferenceServiceServicer_to_server(service, server)
    return server


class _Service(InferenceServicer):  # type: ignore[misc]
    """The calls of the protocol that KServe does not have, or has without limits."""

    def __init__(self, repository: Repository, dataplane: DataPlane, admission: Admission) -> None:
        super().__init__(dataplane, None)
        self._repository, self._admission = repository, admission

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answers a request."""
        model = request.model_name if request.model_name in self._repository.models else ""
        code, began = grpc.StatusCode.OK, time.perf_counter()
        try:
            with self._admission.admitted():
                self.validate_grpc_request(request)
                asked = self._repository.named(request.model_name, request.model_version)
                given = InferRequest.from_grpc(request)
                response = await asked.predict(given, to_headers(context))
                return response.to_grpc()
        except BaseException as error:
            is_gone = isinstance(error, asyncio.CancelledError)
            code = grpc.StatusCode.CANCELLED if is_gone else _status(error)[0]
            raise
        finally:
            metrics.REQUESTS.labels(model, "grpc", code.name).inc()
            seconds = time.perf_counter() - began
            metrics.REQUEST_SECONDS.labels(model, "grpc").observe(seconds)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Returns the inputs and outputs of a model."""
        self._repository.named(request.name, request.version)
        found = await self._data_plane.model_metadata(request.name)
        return messages.ModelMetadataResponse(**found)

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Returns whether a model can answer."""
        model = self._repository.named(request.name, request.version)
        return messages.ModelReadyResponse(ready=model.loaded is not None)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Loads a model."""
        name = _name_of(request)
        await self._repository.load(name)
        return messages.RepositoryModelLoadResponse(model_name=name, isLoaded=True)

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Unloads a model."""
        name = _name_of(request)
        await self._repository.unload(name)
        return messages.RepositoryModelUnloadResponse(model_name=name, isUnloaded=True)


class _Statuses(AsyncServerInterceptor):
    """Refuses calls without the token, and ends failed ones with their status."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Returns the handler of a method, which gets messages that cannot be read as errors.

        gRPC would log a traceback for each of them.
        """

        async def reading(details: Any) -> Any:
            handler = await continuation(details)
            if handler is None:
                return None
            read = functools.partial(_read, handler.request_deserializer)
            return handler._replace(request_deserializer=read)

        return await super().intercept_service(reading, details)  # type: ignore[no-untyped-call]

    async def intercept(self, method: Any, request: Any, context: Any, method_name: str) -> Any:
        """Answers a call."""
        try:
            if method_name not in _OPEN:
                self._admission.check(dict(context.invocation_metadata()).get("authorization"))
            if isinstance(request, Exception):
                raise request
            return await method(request, context)
        except Exception as error:
            code, text = _status(error)
            if code is grpc.StatusCode.INTERNAL:
                LOG.error("%s failed", method_name, exc_info=error)
            await context.abort(code, text)


def _name_of(request: Any) -> str:
    """Returns the model that a client loads or unloads.

    KServe's messages have it in field 1. NVIDIA's have the name of a repository there, and the
    model in field 2, which KServe's lack.
    """
    for field in UnknownFieldSet(request):
        if field.field_number == 2 and isinstance(field.data, bytes):
            return field.data.decode(errors="replace")
    return str(request.model_name)


def _read(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserialize(data)
    except DecodeError:
        return exceptions.InvalidArgument("the message cannot be read.")


def _status(error: BaseException) -> tuple[grpc.StatusCode, str]:
    if isinstance(error, exceptions.GrpcException):
        return error.status_code, error.details
    if isinstance(error, (errors.InvalidInput, errors.InferenceError)):
        return grpc.StatusCode.INVALID_ARGUMENT, str(error)
    return grpc.StatusCode.INTERNAL, type(error).__name__
