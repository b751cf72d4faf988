"""TLS between ranks that are threads: what is encrypted, who is admitted, and what errors say."""

from __future__ import annotations

import base64
import contextlib
import pathlib
import re
import shlex
import socket
import ssl
import struct
import subprocess
import threading
import time

import certificates
import pytest
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.communicator import TLS_VARIABLES
from tf_dynemb.ranks import rendezvous, tls
from tf_dynemb.ranks.engines import over_gloo
from tf_dynemb.ranks.rendezvous import Rendezvous
from tf_dynemb.ranks.tls import Tls

MARKER = b"a text that nobody else may read"


@pytest.fixture(autouse=True)
def less_patience(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE", 1.0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Another authority."""
    return certificates.Authority(tmp_path_factory.mktemp("tls") / "stranger", "stranger")


@pytest.fixture(scope="module")
def files(authority, stranger, tmp_path_factory):
    """The files of a rank, by what is wrong with them."""
    namesake = certificates.Authority(tmp_path_factory.mktemp("tls") / "ca")
    return {
        "right": authority.rank(),
        "unknown": (*stranger.rank()[:2], authority.certificate),
        "of a namesake": (*namesake.rank()[:2], authority.certificate),
        "of another authority": stranger.rank(),
        "expired": authority.rank(-1),
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def in_threads(calls):
    """Returns the result of each call, or its error."""
    results = [None] * len(calls)

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def meet(encryptions, timeout=20.0, secret=None, port=None, through=None):
    """Runs a rendezvous of ranks, each with a Tls or None; returns the results of an allgather.

    The others reach rank 0 at the port `through`.
    """
    port = port or free_port()

    def run(rank):
        size = len(encryptions)
        place = (rank, size, "127.0.0.1", port if rank == 0 else through or port)
        with contextlib.closing(
            Rendezvous(*place, timeout, secret, "", encryptions[rank])
        ) as meeting:
            return meeting.allgather(MARKER * meeting.rank)

    return in_threads([lambda rank=rank: run(rank) for rank in range(len(encryptions))])


class Recorder:
    """A port that passes on to another place what it receives, and back; and keeps it."""

    def __init__(self, place=None, host="127.0.0.1"):
        self.place, self.heard = place, bytearray()
        self._server = socket.create_server((host, 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._server.accept()
                other = self._reached()
                for pair in ((one, other), (other, one)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _reached(self):
        """A connection to the place, when somebody listens there."""
        for _ in range(400):
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(self.place)
            time.sleep(0.05)
        raise ConnectionRefusedError(self.place)

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while part := source.recv(2**16):
                self.heard += part
                target.sendall(part)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._server.close()


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("secret", [None, "s"])
def test_what_ranks_say_at_the_rendezvous_is_encrypted(files, encrypted, secret):
    encryption = Tls(*files["right"]) if encrypted else None
    port = free_port()
    with contextlib.closing(Recorder(("127.0.0.1", port))) as recorder:
        results = meet([encryption] * 2, secret=secret, port=port, through=recorder.port)
    assert results == [[b"", MARKER]] * 2
    assert (base64.b64encode(MARKER)[:40] in recorder.heard) != encrypted
    assert len(recorder.heard) > len(MARKER)


@pytest.mark.parametrize("size", [2, 4, 9])
@pytest.mark.parametrize("secret", [None, "s"])
def test_ranks_meet(files, size, secret):
    results = meet([Tls(*files["right"]) for _ in range(size)], secret=secret)
    assert results == [[MARKER * r for r in range(size)]] * size


@pytest.mark.parametrize("secret", [None, "s"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_tls(files, secret, rank):
    """Both have an error within the timeout, which names the variables or says what is missing."""
    encryptions = [Tls(*files["right"])] * 2
    encryptions[rank] = None
    begin = time.monotonic()
    first, second = meet(encryptions, timeout=3.0, secret=secret)
    assert time.monotonic() - begin < 6
    assert isinstance(first, TimeoutError)
    assert "ranks 1 of 2 have not come" in str(first)
    assert isinstance(second, ConnectionError)
    assert "TF_DYNEMB_RANKS_TLS_C" in str(second)
    assert "; what came from 127.0.0.1 was refused: " in str(first)
    if rank == 0:
        assert "it uses TLS, and here TF_DYNEMB_RANKS_TLS_CERTIFICATE is not set" in str(first)


@pytest.mark.parametrize(
    ("kinds", "at_first", "at_second"),
    [
        (("right", "unknown"), "unable to get local issuer", "refuses the certificate of rank 1"),
        (("right", "of another authority"), "alert unknown ca", "the certificate is not accepted"),
        (("right", "expired"), "certificate has expired", "refuses the certificate of rank 1"),
        (("right", "of a namesake"), "signature failure", "refuses the certificate of rank 1"),
        (("unknown", "right"), "alert unknown ca", "unable to get local issuer"),
        (("expired", "right"), "alert certificate expired", "certificate has expired"),
    ],
    ids=str,
)
def test_a_certificate_that_is_not_accepted(files, kinds, at_first, at_second):
    first, second = meet([Tls(*files[kind]) for kind in kinds], timeout=2.0)
    assert isinstance(first, TimeoutError)
    assert isinstance(second, ConnectionError)
    assert at_first in str(first)
    assert at_second in str(second)


def strangers(files):
    """What connects and is no rank: functions of a connected socket."""

    def without_certificate(connected):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(files["right"][2])
        speak(context, connected)

    def of_version_1_2(connected):
        context = Tls(*files["right"])._contexts[False]
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        speak(context, connected)

    def speak(context, connected):
        with contextlib.suppress(OSError), context.wrap_socket(connected) as secure:
            secure.sendall(b"\0" * 4096)
            while secure.recv(4096):
                pass
        connected.close()

    def with_certificate(kind):
        return lambda connected: speak(Tls(*files[kind])._contexts[False], connected)

    def says(text):
        def say(connected):
            with contextlib.suppress(OSError), connected:
                connected.sendall(text)
                while connected.recv(4096):
                    pass

        return say

    return {
        "says nothing": says(b""),
        "HTTP": says(b"GET / HTTP/1.1\r\n\r\n"),
        "garbage": says(bytes(range(256)) * 64),
        "begins TLS and stops": says(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        "a message of Gloo": says(struct.pack("<6Q", 52, 1, 4711, 0, 4, 0) + b"text"),
        "leaves": lambda connected: connected.close(),
        "without a certificate": without_certificate,
        "TLS 1.2": of_version_1_2,
        "certificate that is unknown": with_certificate("unknown"),
        "certificate that is expired": with_certificate("expired"),
    }


STRANGERS = tuple(strangers({}))


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_at_the_rendezvous_does_not_hold_up_the_ranks(files, who):
    port, encryption = free_port(), Tls(*files["right"])

    def come():
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", port))

    def run(rank):
        place = (rank, 2, "127.0.0.1", port)
        with contextlib.closing(Rendezvous(*place, 20, None, "", encryption)) as meeting:
            return meeting.allgather(b"%d" % rank)

    def second():
        connected = come()
        thread = threading.Thread(target=strangers(files)[who], args=(connected,), daemon=True)
        thread.start()
        time.sleep(0.2)
        return run(1)

    begin = time.monotonic()
    assert in_threads([lambda: run(0), second]) == [[b"0", b"1"]] * 2
    assert time.monotonic() - begin < 10


def listen(rank, host, files, timeout=20.0, size=2):
    """Returns the group of a rank that listens, and its addresses."""
    operand = Tls(*files).operand() if files else []
    group, addresses = _ops.library().dynemb_ranks_listen(
        host, rank, size, timeout, tf.constant(operand, tf.string)
    )
    return group, addresses.numpy().tolist()


def connect(group, addresses):
    _ops.library().dynemb_ranks_connect(group, addresses, [str(r) for r in range(len(addresses))])


def place_of(address):
    """The host and port of an address of Gloo, which begins with the system's."""
    _, port, host = struct.unpack_from("!HH4s", address)
    return socket.inet_ntoa(host), port


def at(address, host, port):
    """The same address at another place."""
    return address[:2] + struct.pack("!H4s", port, socket.inet_aton(host)) + address[8:]


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_ranks_send_each_other_is_encrypted(files, encrypted):
    """Of two ranks, the one with the higher address connects."""
    of_rank = files["right"] if encrypted else None
    with contextlib.closing(Recorder()) as recorder:
        (first, at_first), (second, at_second) = (
            listen(rank, f"127.0.0.{2 + rank}", of_rank) for rank in range(2)
        )
        recorder.place = place_of(at_first[1])
        shown = at(at_first[1], "127.0.0.1", recorder.port)
        errors = in_threads(
            [
                lambda: connect(first, [b"", at_second[0]]),
                lambda: connect(second, [shown, b""]),
            ]
        )
        assert errors == [None, None]
        data = tf.constant([MARKER.decode()] * 1000)
        data = tf.io.decode_raw(tf.strings.reduce_join(data)[None], tf.uint8)[0]
        gathered = in_threads(
            [
                lambda group=group: _ops.library().dynemb_ranks_allgather(
                    group, data, operation="texts"
                )
                for group in (first, second)
            ]
        )
        for each in gathered:
            assert each.numpy().tobytes() == MARKER * 2000
        assert len(recorder.heard) > 2 * 1000 * len(MARKER)
        assert (MARKER in recorder.heard) != encrypted
        assert (at_first[1][-16:] in recorder.heard) != encrypted  # the token


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_that_connects_to_a_rank_is_an_error(files, who):
    """It comes before the rank that the port is for."""
    group, (_, own) = listen(0, "127.0.0.2", files["right"], timeout=2.0)
    connected = socket.create_connection(place_of(own))
    threading.Thread(target=strangers(files)[who], args=(connected,), daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(tf.errors.AbortedError, match="rank 0 cannot connect to rank 1: ") as error:
        connect(group, [b"", at(own, "127.0.0.3", 1)])
    assert time.monotonic() - begin < 10
    if who.startswith("certificate"):
        reason = {"unknown": "unable to get local issuer", "expired": "certificate has expired"}
        assert reason[who.split()[-1]] in str(error.value)
    if who == "without a certificate":
        assert "peer did not return a certificate" in str(error.value)
    if who == "TLS 1.2":
        assert "unsupported protocol" in str(error.value)


def servers(files):
    """What accepts a connection and is no rank."""

    def with_certificate(kind):
        def serve(connected):
            with contextlib.suppress(OSError):
                secure = Tls(*files[kind]).wrap(connected, is_server=True)
                while secure.recv(4096):
                    pass

        return serve

    said = {who: stranger for who, stranger in strangers(files).items() if "ertificate" not in who}
    return {
        **{who: stranger for who, stranger in said.items() if who != "TLS 1.2"},
        "certificate that is unknown": with_certificate("unknown"),
        "certificate that is expired": with_certificate("expired"),
    }


@pytest.mark.parametrize("who", tuple(servers({})))
def test_a_rank_that_connects_to_a_stranger_has_an_error(files, who):
    group, (_, own) = listen(0, "127.0.0.2", files["right"], timeout=2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(
            target=lambda: servers(files)[who](server.accept()[0]), daemon=True
        ).start()
        begin = time.monotonic()
        with pytest.raises(tf.errors.AbortedError, match="rank 0 cannot connect to rank 1: ") as e:
            connect(group, [b"", at(own, *server.getsockname())])
        assert time.monotonic() - begin < 10
    if who.startswith("certificate"):
        assert "TLS: the certificate is not accepted: " in str(e.value)


def test_a_rank_that_the_others_do_not_accept(files):
    """With TLS 1.3 it learns it after its own part of the handshake."""
    kinds = ("right", "unknown")
    (first, at_first), (second, at_second) = (
        listen(rank, f"127.0.0.{2 + rank}", files[kind], timeout=5.0)
        for rank, kind in enumerate(kinds)
    )
    errors = in_threads(
        [
            lambda: connect(first, [b"", at_second[0]]),
            lambda: connect(second, [at_first[1], b""]),
        ]
    )
    assert [type(error) for error in errors] == [tf.errors.AbortedError] * 2
    assert "rank 0 cannot connect to rank 1: " in str(errors[0])
    # Whether the alert of rank 0 is read, or the end of the connection, depends on the moment.
    assert re.search("rank 0 has ended|unknown ca", str(errors[1]))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_communicate(files, size):
    port = free_port()

    def run(rank):
        comm = over_gloo(rank, size, "127.0.0.1", port, 30, None, "", Tls(*files["right"]))
        sums = comm.allreduce([tf.fill([2**18], float(rank + 1))], False, "sum")[0]
        gathered = comm.allgather(tf.fill([rank], rank), "gathered")
        return float(tf.reduce_max(sums)), float(tf.reduce_min(sums)), gathered.numpy().tolist()

    total = size * (size + 1) / 2
    gathered = [rank for rank in range(size) for _ in range(rank)]
    results = in_threads([lambda rank=rank: run(rank) for rank in range(size)])
    assert results == [(total, total, gathered)] * size


def test_the_rendezvous_refuses_tls_1_2(files):
    one, other = socket.socketpair()
    threading.Thread(target=strangers(files)["TLS 1.2"], args=(other,), daemon=True).start()
    with one, pytest.raises(ssl.SSLError, match="unsupported protocol"):
        Tls(*files["right"]).wrap(one, is_server=True)


def test_no_variable_means_no_tls():
    assert tls.find({}) is None
    assert tls.find(dict.fromkeys(TLS_VARIABLES, "")) is None


@pytest.mark.parametrize("missing", range(3))
def test_the_variables_are_set_together(files, missing):
    environment = certificates.variables(files["right"])
    name = list(environment)[missing]
    del environment[name]
    with pytest.raises(ValueError, match=f"must be set together; not set: {name}"):
        tls.find(environment)


def test_files_that_cannot_be_used_are_named(files, authority, stranger, tmp_path):
    certificate, key, ca = files["right"]
    empty = tmp_path / "empty.pem"
    empty.touch()
    wrong = [
        (("/no", key, ca), "No such file"),
        ((certificate, "/no", ca), "No such file"),
        ((certificate, key, "/no"), "No such file"),
        ((certificate, key, str(empty)), "no certificate or crl found"),
        ((certificate, stranger.rank()[1], ca), "key values mismatch"),
        (authority.rank(password="secret"), "the key has a password"),
    ]
    for given, error in wrong:
        named = certificates.variables(given)
        with pytest.raises(ValueError, match=f"cannot be used: .*{error}") as raised:
            tls.find(named)
        for name, file in named.items():
            assert f"{name}={file!r}" in str(raised.value)


PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "scaling.md"


@pytest.mark.skipif(not PAGE.exists(), reason="no documents: this tests a wheel")
@pytest.mark.usefixtures("authority")  # skips without `openssl`
def test_the_commands_of_the_documents(tmp_path):
    lines = re.findall(r"^    (openssl .*|export TF_DYNEMB_RANKS_TLS.*)$", PAGE.read_text(), re.M)
    assert len(lines) == 4
    for line in lines[:3]:
        subprocess.run(shlex.split(line), cwd=tmp_path, check=True, capture_output=True)
    named = dict(word.split("=") for word in lines[3].split()[1:])
    found = tls.find({name: str(tmp_path / file) for name, file in named.items()})
    assert meet([found] * 2) == [[b"", MARKER]] * 2
