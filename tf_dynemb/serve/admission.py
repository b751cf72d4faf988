"""Which requests are let in: by a token, and by the number that are being answered."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterator

from grpc_interceptor import exceptions

from tf_dynemb.serve import metrics

# Bodies that are being read, for each request that may be answered.
_BODIES = 4


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
