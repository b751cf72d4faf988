"""Cases for test_failures.py, most of which fail; the name keeps pytest from collecting them."""

import os
import time

import pytest
import tensorflow as tf


def test_passes(comm):
    assert comm.gather_objects(comm.rank, "rank") == [0, 1]


def test_rank_1_fails_while_rank_0_waits(comm):
    assert comm.rank == 0, "planted"
    comm.barrier()


def test_passes_after_a_failure(comm):
    assert comm.gather_objects(comm.rank, "rank") == [0, 1]


def test_rank_1_does_not_call(comm):
    if comm.rank == 0:
        comm.barrier("missed")


def test_passes_after_a_stall(comm):
    assert comm.gather_objects(comm.rank, "rank") == [0, 1]


def test_rank_1_does_not_call_a_function(comm):
    if comm.rank == 0:
        tf.function(lambda: comm.allgather(tf.ones([1]), "dynemb/missed/graph"))()


def test_passes_after_a_stall_in_a_function(comm):
    assert comm.gather_objects(comm.rank, "rank") == [0, 1]


def test_rank_1_skips(comm):
    if comm.rank == 1:
        pytest.skip("planted")


def test_both_skip():
    pytest.skip("a reason")


def test_rank_1_ends_while_rank_0_waits(comm):
    if comm.rank == 1:
        time.sleep(0.5)
        os._exit(0)  # with another status horovodrun would end rank 0 as well
    ended = {
        "gloo": (tf.errors.AbortedError, "on rank 0: rank 1 has ended"),
        "horovod": (tf.errors.UnknownError, "Horovod has been shut down"),
        "mpi": (tf.errors.AbortedError, "rank 1"),  # unless mpiexec has ended rank 0
    }
    error, text = ended[os.environ["DYNEMB_ENGINE"]]
    with pytest.raises(error, match=text):
        comm.barrier()


def test_after_the_end_of_rank_1():
    pass
