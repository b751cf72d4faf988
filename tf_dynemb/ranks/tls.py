"""TLS between ranks: the files of this rank, from its environment."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping

from tf_dynemb.communicator import TLS_VARIABLES


class Tls:
    """What a rank shows the others, and by what it knows them: three paths of PEM files.

    Both ends of a connection show a certificate that the authority has signed, and speak TLS 1.3.
    The names in certificates are not compared.

    Args:
        certificate: the certificate of this rank.
        key: its private key, without a password.
        authority: the certificate of the authority that has signed those of all ranks.

    Raises:
        ValueError: a file cannot be used; the message names the variables.
    """

    def __init__(self, certificate: str, key: str, authority: str) -> None:
        self._files = certificate, key, authority
        self._contexts = {
            is_server: self._context(is_server, dict(zip(TLS_VARIABLES, self._files, strict=True)))
            for is_server in (True, False)
        }

    def operand(self) -> list[str]:
        """Returns the operand `tls` of DynembRanksListen."""
        return [_openssl(), *self._files]

    def wrap(self, connected: socket.socket, is_server: bool) -> ssl.SSLSocket:
        """Returns a socket with TLS over a connected one, which it takes.

        Raises:
            OSError: the handshake has failed, or has not ended within the timeout of the socket.
        """
        secure = self._contexts[is_server].wrap_socket(
            connected, server_side=is_server, do_handshake_on_connect=False
        )
        try:
            secure.do_handshake()
        except BaseException:
            secure.close()
            raise
        return secure

    @staticmethod
    def _context(is_server: bool, files: Mapping[str, str]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        certificate, key, authority = files.values()
        try:
            context.load_verify_locations(authority)
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in files.items())
            raise ValueError(f"{given} cannot be used: {reason(error)}") from error
        return context


def find(environment: Mapping[str, str]) -> Tls | None:
    """Returns the TLS that the variables of an environment name; None if they are not set.

    Raises:
        ValueError: only some are set, or a file cannot be used; the message names them.
    """
    files = [environment.get(name, "") for name in TLS_VARIABLES]
    if not any(files):
        return None
    missing = [name for name, file in zip(TLS_VARIABLES, files, strict=True) if not file]
    if missing:
        raise ValueError(
            f"{', '.join(TLS_VARIABLES)} must be set together; not set: {', '.join(missing)}."
        )
    return Tls(*files)


def reason(error: BaseException) -> str:
    """Returns what an error says of TLS, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error) or type(error).__name__


def _no_password() -> str:
    raise ValueError("the key has a password")


def _openssl() -> str:
    """Returns the path of the module that is linked to Python's OpenSSL; "" if it has no file."""
    import _ssl

    return str(getattr(_ssl, "__file__", ""))
