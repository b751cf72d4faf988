"""The meeting of ranks at rank 0, where each learns how to reach the others.

Rank 0 listens; each other rank connects, and says which one it is. Then the ranks exchange byte
strings. With a secret, the two ends of a connection prove to each other that they know it, by HMAC
of a challenge (`multiprocessing.connection`), before anything else; nothing is encrypted. Only JSON
is decoded.
"""

from __future__ import annotations

import base64
import contextlib
import json
import multiprocessing
import socket
import struct
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

# The seconds that a process may take to say who it is, once it is connected: one that is no rank
# must not hold up the others.
_PATIENCE = 5.0


class Rendezvous:
    """The connections of a rank: of rank 0 to each other rank, and of each other one to rank 0.

    Args:
        rank: the number of this process.
        size: the number of ranks, at least 2.
        host: a name or address of rank 0's machine. Rank 0 listens at this address only.
        port: the port there.
        timeout: the seconds until a rank that has not come is an error.
        secret: what all ranks know, or None.

    Attributes:
        address: the address of this machine in the network that the ranks share.

    Raises:
        TimeoutError: ranks have not come, or rank 0 does not answer; the message names them.
        ConnectionError: rank 0 has refused this process, or two have the same number; on all ranks.
        OSError: rank 0 cannot listen.
    """

    address: str

    def __init__(
        self, rank: int, size: int, host: str, port: int, timeout: float, secret: str | None
    ) -> None:
        self.rank, self.size = rank, size
        self._where = f"{host}:{port}"
        self._end = time.monotonic() + timeout
        self._timeout = timeout
        self._secret = secret.encode() if secret else None
        self._peers: dict[int, Connection[Any, Any]] = {}
        try:
            if rank == 0:
                self._listen(host, port)
            else:
                self._connect(host, port)
        except BaseException:
            self.close()
            raise

    def allgather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of all ranks, in their order. Collective."""
        text = base64.b64encode(data).decode()
        if self.rank:
            self._send(0, {"data": text})
            everyone = self._receive(0)["all"]
        else:
            everyone = [text, *(self._receive(r)["data"] for r in range(1, self.size))]
            for other in self._peers:
                self._send(other, {"all": everyone})
        return [base64.b64decode(item) for item in everyone]

    def close(self) -> None:
        """Closes the connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _listen(self, host: str, port: int) -> None:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            server = socket.create_server(place[:2], family=family, backlog=self.size)
        except OSError as error:
            raise OSError(error.errno, f"rank 0 cannot listen at {self._where}: {error}") from error
        self.address = str(place[0])
        with server:
            while len(self._peers) < self.size - 1:
                server.settimeout(max(0.001, self._end - time.monotonic()))
                try:
                    accepted, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.size)) - self._peers.keys())
                    self._refuse(
                        TimeoutError(
                            f"ranks {', '.join(map(str, missing))} of {self.size} have not come "
                            f"to {self._where} within {self._timeout:g} s"
                        )
                    )
                self._welcome(accepted)

    def _welcome(self, accepted: socket.socket) -> None:
        """Adds a rank, if it is one that knows the secret."""
        peer: Connection[Any, Any] = _connection(accepted)
        try:
            if self._secret is not None:
                deliver_challenge(peer, self._secret)
                answer_challenge(peer, self._secret)
            if not peer.poll(_PATIENCE):
                raise EOFError
            hello = json.loads(peer.recv_bytes(2**16))
            rank, size = int(hello["rank"]), int(hello["size"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, multiprocessing.ProcessError):
            peer.close()  # no rank of this job
            return
        if size != self.size or not 0 < rank < size:
            error = ConnectionError(
                f"a process that came to {self._where} says that it is rank {rank} of {size}, and "
                f"rank 0 expects {self.size} ranks"
            )
        elif rank in self._peers:
            error = ConnectionError(f"two processes came to {self._where} as rank {rank}")
        else:
            self._peers[rank] = peer
            return
        self._peers.setdefault(-1, peer)
        self._refuse(error)

    def _refuse(self, error: OSError) -> None:
        """Tells the ranks that are here, and raises the error."""
        for other in self._peers:
            self._send(other, {"error": str(error), "late": isinstance(error, TimeoutError)})
        raise error

    def _connect(self, host: str, port: int) -> None:
        while True:
            left = self._end - time.monotonic()
            try:
                connected = socket.create_connection((host, port), timeout=max(0.001, left))
                break
            except OSError as error:
                if left <= 0:
                    raise TimeoutError(
                        f"rank 0 does not answer at {self._where} for {self._timeout:g} s: {error}"
                    ) from error
                time.sleep(0.05)
        self.address = connected.getsockname()[0]
        peer: Connection[Any, Any] = _connection(connected)
        self._peers[0] = peer
        if self._secret is not None:
            try:
                if not peer.poll(max(0.0, self._end - time.monotonic())):
                    raise EOFError
                answer_challenge(peer, self._secret)
                deliver_challenge(peer, self._secret)
            except (EOFError, OSError, multiprocessing.AuthenticationError) as error:
                raise ConnectionError(
                    f"rank 0 at {self._where} has another TF_DYNEMB_RANKS_SECRET than rank "
                    f"{self.rank}, or none"
                ) from error
        self._send(0, {"rank": self.rank, "size": self.size})

    def _send(self, other: int, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its end is an error of the next _receive
            self._peers[other].send_bytes(json.dumps(message).encode())

    def _receive(self, other: int) -> dict[str, Any]:
        peer = self._peers[other]
        try:
            if not peer.poll(max(0.0, self._end - time.monotonic())):
                raise TimeoutError(f"rank {other} has said nothing for {self._timeout:g} s")
            message: dict[str, Any] = json.loads(peer.recv_bytes())
        except TimeoutError:
            raise
        except (EOFError, OSError, ValueError) as error:
            raise ConnectionError(
                f"rank {other} has ended, or has another TF_DYNEMB_RANKS_SECRET than rank "
                f"{self.rank}"
            ) from error
        if "error" in message:
            kind = TimeoutError if message["late"] else ConnectionError
            raise kind(message["error"])
        return message


def _connection(connected: socket.socket) -> Connection[Any, Any]:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A read that has begun ends after this time; `poll` waits for the beginning.
    connected.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(_PATIENCE), 0)
    )
    return Connection(connected.detach())
