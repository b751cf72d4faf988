"""The meeting of ranks at rank 0, where each learns how to reach the others.

Rank 0 listens; each other rank connects, and says which one of which job it is. Then the ranks
exchange byte strings. With TLS, the two ends of a connection show each other certificates, and
everything is encrypted. With a secret, they prove to each other that they know it, by HMAC of a
challenge (`multiprocessing.connection`), before anything else. Only JSON is decoded.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import logging
import multiprocessing
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, cast

from tf_dynemb.communicator import TLS_VARIABLES
from tf_dynemb.ranks.tls import Tls, reason

# The seconds that a process may take to say who it is, once it is connected.
_PATIENCE = 5.0
# How long a call may last: the system's longest is shorter than timeouts can be.
_LONGEST = 1e6
# The seconds after which a peer that takes nothing is not waited for.
_LONGEST_SEND = 30.0
# The seconds that other ranks wait longer than rank 0, which tells them whom it has waited for.
_LONGER = 5.0
# The seconds after which a rank says for whom it waits.
_QUIET = 10.0

_log = logging.getLogger("tf_dynemb")


class Rendezvous:
    """The connections of a rank: of rank 0 to each other rank, and of each other one to rank 0.

    Args:
        rank: the number of this process.
        size: the number of ranks, at least 2.
        host: a name or address of rank 0's machine. At an address, or "localhost", rank 0 listens
            there only. At a name it listens at all addresses: a machine often knows itself by
            another address than its neighbours do.
        port: the port there.
        timeout: the seconds until a rank that has not come is an error.
        secret: what all ranks know, or None.
        job: a name that the ranks of another job would not have; "" if there is none.
        tls: what the ranks show each other, if the connections are encrypted.

    Attributes:
        address: the address of this machine in the network that the ranks share.

    Raises:
        TimeoutError: ranks have not come, or rank 0 does not answer; the message names them.
        ConnectionError: rank 0 has refused this process, or two have the same number; on all ranks.
        OSError: rank 0 cannot listen.
    """

    address: str

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        port: int,
        timeout: float,
        secret: str | None,
        job: str = "",
        tls: Tls | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._where = f"{host}:{port}"
        self._end = time.monotonic() + timeout
        self._timeout = timeout
        self._tls = tls
        # With TLS 1.3, a rank that connects learns that its certificate is refused when it receives
        # something, and it must not send before: so rank 0 always challenges it.
        self._secret = (secret or "").encode() if secret or tls else None
        self._job = job
        self._peers: dict[int, _Peer] = {}
        self._refused = ""  # why a process that has come is no rank
        try:
            if rank == 0:
                self._listen(host, port)
            else:
                self._connect(host, port)
        except BaseException:
            self.close()
            raise

    def alltoall(self, data: Sequence[bytes]) -> list[bytes]:
        """Returns what each rank has in `data` for this one, in their order. Collective."""
        texts = [base64.b64encode(item).decode() for item in data]
        if self.rank:
            self._send(0, {"data": texts})
            received = self._receive(0)["data"]
        else:
            try:
                rows = [texts, *(self._receive(r)["data"] for r in range(1, self.size))]
            except OSError as error:
                self._refuse(error)
            for other in self._peers:
                self._send(other, {"data": [row[other] for row in rows]})
            received = [row[0] for row in rows]
        return [base64.b64decode(item) for item in received]

    def allgather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of all ranks, in their order. Collective."""
        return self.alltoall([data] * self.size)

    def close(self) -> None:
        """Closes the connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _listen(self, host: str, port: int) -> None:
        try:
            server = _server(host, port, self.size)
        except OSError as error:
            raise OSError(error.errno, f"rank 0 cannot listen at {self._where}: {error}") from error
        come: queue.Queue[tuple[_Peer, Any]] = queue.Queue()
        addresses = [server.getsockname()[0]] if is_address(host) else []
        threading.Thread(target=self._accept, args=(server, come, addresses), daemon=True).start()
        said = time.monotonic() + _QUIET
        try:
            while len(self._peers) < self.size - 1:
                now = time.monotonic()
                missing = sorted(set(range(1, self.size)) - self._peers.keys())
                who = f"ranks {', '.join(map(str, missing))} of {self.size}"
                if now >= self._end:
                    self._refuse(
                        TimeoutError(
                            f"{who} have not come to {self._where} within {self._timeout:g} s"
                            f"{self._refused}"
                        )
                    )
                if now >= said:
                    _log.warning("%s have not come to %s yet", who, self._where)
                    said += max(_QUIET, 2 * (now - said))
                with contextlib.suppress(queue.Empty):
                    self._add(*come.get(timeout=min(0.2, self._end - now)))
        finally:
            server.close()
        # One by which ranks of other machines have come, if there are any.
        self.address = next((a for a in addresses if not _is_loopback(a)), addresses[0])
        for other in self._peers:
            self._send(other, {"address": self.address})

    def _accept(
        self,
        server: socket.socket,
        come: queue.Queue[tuple[_Peer, Any]],
        addresses: list[str],
    ) -> None:
        """Runs in a thread: greets each process in one more, so that none holds up the others."""
        with contextlib.suppress(OSError):  # the server is closed
            while True:
                accepted, (of, *_) = server.accept()
                threading.Thread(
                    target=self._greet, args=(accepted, of, come, addresses), daemon=True
                ).start()

    def _greet(
        self,
        accepted: socket.socket,
        of: str,
        come: queue.Queue[tuple[_Peer, Any]],
        addresses: list[str],
    ) -> None:
        address = _plain(accepted.getsockname()[0])
        peer = _Peer(accepted, time.monotonic() + min(_PATIENCE, self._timeout))
        try:
            if self._tls is not None:
                peer.encrypt(self._tls, is_server=True)
            if self._secret is not None:
                deliver_challenge(cast("Connection[Any, Any]", peer), self._secret)
                answer_challenge(cast("Connection[Any, Any]", peer), self._secret)
            hello = json.loads(peer.recv_bytes(2**16))
            if not isinstance(hello["rank"], int) or not isinstance(hello["size"], int):
                raise ValueError(hello)
        except (
            OSError,
            EOFError,
            ValueError,
            KeyError,
            TypeError,
            multiprocessing.ProcessError,
        ) as error:
            self._refused = f"; what came from {_plain(of)} was refused: {reason(error)}"
            peer.close()
            return
        peer.end = self._end
        addresses.append(address)
        come.put((peer, hello))

    def _add(self, peer: _Peer, hello: Mapping[str, Any]) -> None:
        """Adds a rank."""
        rank, size, job = hello["rank"], hello["size"], hello.get("job", "")
        if job != self._job:
            self._tell(peer, f"{self._where} belongs to another job ({self._job!r}, not {job!r})")
            peer.close()
            return
        if size != self.size or not 0 < rank < size:
            error = (
                f"a process that came to {self._where} says that it is rank {rank} of {size}, and "
                f"rank 0 expects {self.size} ranks"
            )
        elif rank in self._peers:
            error = f"two processes came to {self._where} as rank {rank}"
        else:
            self._peers[rank] = peer
            return
        self._tell(peer, error)
        self._refuse(ConnectionError(error))

    def _refuse(self, error: OSError) -> None:
        """Tells the ranks that are here, and raises the error."""
        for peer in self._peers.values():
            self._tell(peer, str(error), isinstance(error, TimeoutError))
        raise error

    @staticmethod
    def _tell(peer: _Peer, error: str, late: bool = False) -> None:
        with contextlib.suppress(OSError):
            peer.send_bytes(json.dumps({"error": error, "late": late}).encode())

    def _connect(self, host: str, port: int) -> None:
        begin = time.monotonic()
        said = begin + _QUIET
        while True:
            now = time.monotonic()
            left = self._end - now
            try:
                connected = socket.create_connection(
                    (host, port), timeout=min(_QUIET, max(0.001, left))
                )
                # Before rank 0 listens, the system may connect a socket to itself.
                if connected.getsockname() != connected.getpeername():
                    break
                connected.close()
            except OSError as error:
                if left <= 0:
                    raise TimeoutError(
                        f"rank 0 does not answer at {self._where} for {self._timeout:g} s: {error}"
                    ) from error
                if now >= said:
                    _log.warning("rank 0 does not answer at %s yet: %s", self._where, error)
                    said = now + (now - begin)
            time.sleep(0.05)
        own = _plain(connected.getsockname()[0])
        self._peers[0] = peer = _Peer(connected, self._end)
        if self._tls is not None:
            try:
                peer.encrypt(self._tls, is_server=False)
            except (OSError, EOFError) as error:
                raise ConnectionError(
                    f"rank 0 at {self._where} does not show by TLS that it belongs to the ranks of "
                    f"{TLS_VARIABLES[-1]}: {reason(error)}"
                ) from error
        if self._secret is not None:
            try:
                answer_challenge(cast("Connection[Any, Any]", peer), self._secret)
                deliver_challenge(cast("Connection[Any, Any]", peer), self._secret)
            except ssl.SSLError as error:
                raise ConnectionError(
                    f"rank 0 at {self._where} refuses the certificate of rank {self.rank} "
                    f"({TLS_VARIABLES[0]}): {reason(error)}"
                ) from error
            except (EOFError, OSError, multiprocessing.AuthenticationError) as error:
                raise ConnectionError(
                    f"rank 0 at {self._where} has another TF_DYNEMB_RANKS_SECRET than rank "
                    f"{self.rank}, or none, or differs in {TLS_VARIABLES[0]}: {reason(error)}"
                ) from error
        peer.end = self._end + _LONGER
        self._send(0, {"rank": self.rank, "size": self.size, "job": self._job})
        of_root = self._receive(0)["address"]
        # On rank 0's machine this rank is where rank 0 is.
        self.address = of_root if _is_loopback(own) else own

    def _send(self, other: int, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its end is an error of the next _receive
            self._peers[other].send_bytes(json.dumps(message).encode())

    def _receive(self, other: int) -> dict[str, Any]:
        peer = self._peers[other]
        try:
            message: dict[str, Any] = json.loads(peer.recv_bytes())
        except TimeoutError as error:
            raise TimeoutError(f"rank {other} has said nothing for {self._timeout:g} s") from error
        except (EOFError, OSError, ValueError) as error:
            differs = ""
            if other == 0:
                differs = (
                    ", or has another TF_DYNEMB_RANKS_SECRET, or differs in " + TLS_VARIABLES[0]
                )
            raise ConnectionError(f"rank {other} has ended{differs}") from error
        if "error" in message:
            kind = TimeoutError if message["late"] else ConnectionError
            raise kind(message["error"])
        return message


def is_address(host: str) -> bool:
    """Whether a host is an address, or localhost, and not another name."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return host == "localhost"


def _server(host: str, port: int, size: int) -> socket.socket:
    if is_address(host):
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=size)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=size, dualstack_ipv6=both)


def _plain(address: str) -> str:
    """An address of IPv4 as such, which a socket for both versions has inside one of IPv6."""
    return address.removeprefix("::ffff:") if address.count(".") == 3 else address


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class _Peer:
    """A connection that carries messages, as `multiprocessing.connection.Connection` does.

    Args:
        connected: the socket, which it takes.
        end: the time, by `time.monotonic`, until which it waits for messages.

    Attributes:
        end: as above.
    """

    def __init__(self, connected: socket.socket, end: float) -> None:
        self._socket = connected
        self.end = end
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def encrypt(self, tls: Tls, is_server: bool) -> None:
        """Begins TLS.

        Raises:
            OSError: the handshake has failed, or has not ended in time.
        """
        self._wait()
        self._socket = tls.wrap(self._socket, is_server)

    def send_bytes(self, data: bytes) -> None:
        """Sends a message."""
        self._socket.settimeout(_LONGEST_SEND)
        self._socket.sendall(struct.pack("!I", len(data)) + data)

    def recv_bytes(self, most: int = 2**28) -> bytes:
        """Receives a message.

        Raises:
            TimeoutError: it has not arrived in time.
            EOFError: the other end has ended.
            OSError: the connection is lost, the message has more than `most` bytes, or it is none.
        """
        head = self._receive(4)
        if head[:2] in (b"\x15\x03", b"\x16\x03"):  # the first bytes of an alert and of a handshake
            raise OSError(f"it uses TLS, and here {TLS_VARIABLES[0]} is not set")
        (length,) = struct.unpack("!I", head)
        if length > most:
            raise OSError("it is no rank")
        return self._receive(length)

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _receive(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            self._wait()
            part = self._socket.recv(min(length - len(parts), 2**20))
            if not part:
                raise EOFError("it has ended the connection")
            parts += part
        return bytes(parts)

    def _wait(self) -> None:
        """Lets the next call of the socket end in time."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("it has said nothing in time")
        self._socket.settimeout(min(_LONGEST, left))
