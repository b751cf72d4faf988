"""The rendezvous of ranks that are threads: who comes, who does not, and who may not."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time

import pytest

from tf_dynemb.ranks import rendezvous
from tf_dynemb.ranks.rendezvous import Rendezvous


@pytest.fixture(autouse=True)
def less_patience(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE", 1.0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(size, ranks=None, timeout=20.0, secrets=None, then=None, sizes=None, jobs=None, host=None):
    """Runs a rendezvous for each rank; returns the result of `then`, or the error, of each."""
    port = free_port()
    ranks = list(range(size)) if ranks is None else ranks
    results = [None] * len(ranks)

    def run(i):
        secret = secrets[i] if secrets else None
        of = sizes[i] if sizes else size
        try:
            job = jobs[i] if jobs else ""
            meeting = Rendezvous(ranks[i], of, host or "127.0.0.1", port, timeout, secret, job)
            with contextlib.closing(meeting):
                results[i] = then(meeting) if then else meeting.address
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("secret", [None, "s"])
def test_all_ranks_receive_the_bytes_of_all(size, secret):
    def then(meeting):
        first = meeting.allgather(bytes([meeting.rank]) * meeting.rank)
        return first, meeting.allgather(b"%d" % meeting.rank * 100_000)

    results = meet(size, secrets=[secret] * size, then=then)
    expected = [bytes([r]) * r for r in range(size)], [b"%d" % r * 100_000 for r in range(size)]
    assert results == [expected] * size


def test_each_rank_receives_what_the_others_have_for_it():
    def then(meeting):
        return meeting.alltoall([b"%d to %d" % (meeting.rank, r) for r in range(3)])

    assert meet(3, then=then) == [[b"%d to %d" % (s, r) for s in range(3)] for r in range(3)]


def test_the_address_of_this_machine():
    assert meet(2) == ["127.0.0.1"] * 2
    assert meet(2, host="localhost") in (["127.0.0.1"] * 2, ["::1"] * 2)


def test_a_name_of_this_machine():
    """Rank 0 listens at all addresses; both ranks have one that is the same."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        pytest.skip(f"{name} has no address")
    first, second = meet(2, host=name)
    assert first == second
    assert not rendezvous.is_address(name)


def test_ranks_of_another_job():
    first, second = meet(2, jobs=["1 0", "1 1"], timeout=2.0, then=lambda m: m.allgather(b""))
    assert isinstance(first, TimeoutError)
    assert isinstance(second, ConnectionError)
    assert "belongs to another job ('1 0', not '1 1')" in str(second)


def test_a_rank_that_ends_after_the_meeting_is_named_on_all_others():
    def then(meeting):
        if meeting.rank == 1:
            return None
        return meeting.allgather(b"")

    first, _, third = meet(3, then=then)
    assert str(first) == str(third) == "rank 1 has ended"


def test_a_timeout_that_no_system_call_takes():
    assert meet(2, timeout=1e9) == ["127.0.0.1"] * 2


def test_ranks_that_do_not_come_are_named_on_all_others():
    def then(meeting):
        return meeting.allgather(b"")

    errors = meet(5, ranks=[0, 2, 4], timeout=1.0, then=then)
    assert [type(error) for error in errors] == [TimeoutError] * 3
    for error in errors:
        assert "ranks 1, 3 of 5 have not come to 127.0.0.1:" in str(error)
        assert "within 1 s" in str(error)


def test_rank_0_does_not_come():
    (error,) = meet(2, ranks=[1], timeout=0.5)
    assert isinstance(error, TimeoutError)
    assert "rank 0 does not answer at 127.0.0.1:" in str(error)


def test_a_rank_says_early_that_rank_0_does_not_answer(monkeypatch, caplog):
    """A wrong address is not silent until the timeout."""
    monkeypatch.setattr(rendezvous, "_QUIET", 0.2)
    meet(2, ranks=[1], timeout=1.0, host="no.such.host.invalid")
    assert "rank 0 does not answer at no.such.host.invalid:" in caplog.text
    assert "yet: " in caplog.text


def test_a_rank_that_comes_late():
    port, results = free_port(), {}

    def run(rank):
        if rank == 0:
            time.sleep(0.5)
        meeting = Rendezvous(rank, 2, "127.0.0.1", port, 20, None)
        results[rank] = meeting.allgather(b"%d" % rank)
        meeting.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [b"0", b"1"], 1: [b"0", b"1"]}


def test_two_processes_with_one_number():
    errors = meet(3, ranks=[0, 1, 1], timeout=10.0, then=lambda meeting: meeting.allgather(b""))
    assert [type(error) for error in errors] == [ConnectionError] * 3
    assert all("two processes came to" in str(error) for error in errors)


def test_another_number_of_ranks():
    errors = meet(2, sizes=[2, 3], then=lambda meeting: meeting.allgather(b""))
    assert [type(error) for error in errors] == [ConnectionError] * 2
    assert all("says that it is rank 1 of 3" in str(error) for error in errors)


@pytest.mark.parametrize("secrets", [["s", "t"], ["s", None], [None, "s"]], ids=str)
def test_another_secret(secrets):
    first, second = meet(
        2, secrets=secrets, timeout=3.0, then=lambda meeting: meeting.allgather(b"")
    )
    assert isinstance(first, TimeoutError)
    assert "ranks 1 of 2 have not come" in str(first)
    assert isinstance(second, ConnectionError)
    assert "another TF_DYNEMB_RANKS_SECRET" in str(second)


def test_strangers_that_send_slowly_do_not_hold_up_the_others():
    port, results, stop = free_port(), {}, threading.Event()

    def run(rank):
        meeting = Rendezvous(rank, 2, "127.0.0.1", port, 20, "s")
        results[rank] = meeting.allgather(b"")
        meeting.close()

    def drip(stranger):
        with contextlib.suppress(OSError):
            stranger.sendall(struct.pack("!i", 200))
            while not stop.wait(0.1):
                stranger.sendall(b"x")

    first = threading.Thread(target=run, args=(0,))
    first.start()
    time.sleep(0.3)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    threads = [threading.Thread(target=drip, args=(stranger,)) for stranger in strangers]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    run(1)
    first.join()
    assert time.monotonic() - begin < 10
    stop.set()
    for thread, stranger in zip(threads, strangers, strict=True):
        thread.join()
        stranger.close()
    assert results == {0: [b"", b""], 1: [b"", b""]}


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!i", 3) + b"abc",
        struct.pack("!i", 2**30),
        struct.pack("!i", 2) + b"{}",
        struct.pack("!i", 2) + b"[]",
        struct.pack("!i", len(t := json.dumps({"rank": "x", "size": 2}))) + t.encode(),
    ],
)
@pytest.mark.parametrize("secret", [None, "s"])
def test_a_process_that_is_no_rank_does_not_hold_up_the_others(sent, secret):
    port, results = free_port(), {}

    def run(rank):
        meeting = Rendezvous(rank, 2, "127.0.0.1", port, 20, secret)
        results[rank] = meeting.allgather(b"%d" % rank)
        meeting.close()

    first = threading.Thread(target=run, args=(0,))
    first.start()
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            stranger = socket.create_connection(("127.0.0.1", port))
            break
    stranger.sendall(sent)
    second = threading.Thread(target=run, args=(1,))
    second.start()
    for thread in (first, second):
        thread.join()
    stranger.close()
    assert results == {0: [b"0", b"1"], 1: [b"0", b"1"]}


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"rank 0 cannot listen at 127.0.0.1:{port}"):
            Rendezvous(0, 2, "127.0.0.1", port, 1, None)
