"""What both protocols ask: KServe's data plane over the models, and which requests are let in."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable, Iterator
from typing import Any

from grpc_interceptor import exceptions
from kserve import ModelRepository
from kserve.protocol import dataplane

from tf_dynemb._version import __version__
from tf_dynemb.serve import metrics
from tf_dynemb.serve.model import Model

# Bodies that are being read, for each request that may be answered.
_BODIES = 4


class Repository(ModelRepository):  # type: ignore[misc]
    """The models of a server. Clients add none.

    Args:
        models: the models.
        can_change: whether clients may unload and load them.
    """

    def __init__(self, models: list[Model], can_change: bool) -> None:
        super().__init__()
        self.models: dict[str, Model] = {model.name: model for model in models}
        self._can_change = can_change

    def named(self, name: str, version: str | None = None) -> Model:
        """Returns a model; raises NotFound. A model without a number is version "1"."""
        model = self.models.get(name)
        if model is None:
            raise exceptions.NotFound(f"there is no model {name!r}.")
        if version and version.lstrip("0") != (model.version or "1").lstrip("0"):
            raise exceptions.NotFound(f"model {name!r} has no version {version!r} now.")
        return model

    async def load(self, name: str) -> None:
        """Loads a model that was unloaded, or looks for a newer version of it."""
        model = self._to_change(name)
        model.load()
        await model.refresh()
        if model.loaded is None:
            why = "; ".join(model.failures.values()) or "there is no version"
            raise exceptions.Unavailable(f"model {name!r} could not be loaded: {why}")

    async def unload(self, name: str) -> None:
        """Unloads a model, after the requests that it has."""
        self._to_change(name).stop()

    def _to_change(self, name: str) -> Model:
        if not self._can_change:
            raise exceptions.PermissionDenied("this server was started without --model-control.")
        return self.named(name)


class DataPlane(dataplane.DataPlane):  # type: ignore[misc]
    """Answers of the server.

    Args:
        repository: its models.
        is_draining: returns whether the server is about to end.
    """

    def __init__(self, repository: Repository, is_draining: Callable[[], bool]) -> None:
        super().__init__(repository)
        self._repository, self._is_draining = repository, is_draining

    def metadata(self) -> dict[str, Any]:
        """Returns the name and the version of the server."""
        extensions = ["model_repository", "binary_tensor_data"]
        return {"name": "tf_dynemb", "version": __version__, "extensions": extensions}

    async def ready(self) -> bool:
        """Returns whether all models can answer, and the server goes on."""
        if self._is_draining():
            return False
        models = self._repository.models.values()
        return all(model.loaded is not None or model.is_unloaded for model in models)

    async def model_ready(
        self, model_name: str, disable_predictor_health_check: bool = False
    ) -> bool:
        """Returns whether a model can answer."""
        return self._repository.named(model_name).loaded is not None

    async def model_metadata(self, model_name: str) -> dict[str, Any]:
        """Returns the inputs and outputs of a model."""
        model = self._repository.named(model_name)
        described = {
            "name": model_name,
            "platform": "tensorflow_savedmodel",
            "inputs": model.get_input_types(),
            "outputs": model.get_output_types(),
        }
        return {**described, **({"versions": [model.version]} if model.version else {})}


class Admission:
    """Lets requests in.

    Args:
        most: the most requests at a time. There is no queue for others.
        token: what clients have to send as `authorization: Bearer TOKEN`; None: nothing.
    """

    def __init__(self, most: int, token: str | None = None) -> None:
        self._most, self._token = most, token
        self._count = self._bodies = 0

    def check(self, authorization: str | None) -> None:
        """Raises Unauthenticated unless a request has the token."""
        if self._token is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        same = hmac.compare_digest(given.encode(), self._token.encode())
        if scheme.lower() != "bearer" or not same:
            raise exceptions.Unauthenticated("the request has no valid token.")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which a body is read; raises ResourceExhausted if there are too many."""
        if self._bodies >= _BODIES * self._most:
            raise exceptions.ResourceExhausted(f"{self._bodies} requests are being read.")
        self._bodies += 1
        try:
            yield
        finally:
            self._bodies -= 1

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """A context in which a request is answered; raises ResourceExhausted above the most."""
        if self._count >= self._most:
            raise exceptions.ResourceExhausted(f"{self._count} requests are being answered.")
        self._count += 1
        metrics.IN_FLIGHT.set(self._count)
        try:
            yield
        finally:
            self._count -= 1
            metrics.IN_FLIGHT.set(self._count)
