"""Connects ranks by an engine, Gloo or an MPI library, to a communicator over its operators."""

from __future__ import annotations

import os
import socket

import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.ranks.gpus import choose_gpu
from tf_dynemb.ranks.launchers import local_rank, local_ranks
from tf_dynemb.ranks.operators import Operators
from tf_dynemb.ranks.rendezvous import Rendezvous
from tf_dynemb.ranks.tls import Tls


def over_gloo(
    rank: int,
    size: int,
    host: str,
    port: int,
    timeout: float,
    secret: str | None,
    job: str = "",
    tls: Tls | None = None,
    machine: str | None = None,
) -> Operators:
    """Meets the other ranks at rank 0, and connects every two by Gloo, with TLS if it is given.

    Ranks with the same `machine` share memory if they can, and forward small messages for each
    other (cc/ranks/hosts_wire.h). It is the name of this machine unless a benchmark gives another.

    Raises:
        OSError: as `Rendezvous`.
        tf.errors.AbortedError: two ranks cannot connect; the message names them.
        tf.errors.FailedPreconditionError: there is no OpenSSL library for TLS.
    """
    meeting = Rendezvous(rank, size, host, port, timeout, secret, job, tls)
    try:
        hosts = meeting.allgather((machine or socket.gethostname()).encode())
        number = local_ranks([host.decode() for host in hosts])[rank]
        choose_gpu(number)
        library = _ops.library()
        with tf.init_scope(), tf.device(_ops.CPU):
            group, addresses = library.dynemb_ranks_listen(
                meeting.address,
                rank,
                size,
                timeout,
                tf.constant(tls.operand() if tls else [], tf.string),
            )
            # What each rank has for this one.
            own = meeting.alltoall(addresses.numpy().tolist())
            library.dynemb_ranks_connect(group, own, hosts)
    finally:
        meeting.close()
    return Operators(group, rank, size, number)


def over_mpi(library: str, timeout: float) -> Operators:
    """Joins the ranks that a launcher of MPI has started.

    Raises:
        tf.errors.FailedPreconditionError: the library is not usable; the message says why.
    """
    own = local_rank(os.environ)
    if own is not None:
        choose_gpu(own)
    with tf.init_scope(), tf.device(_ops.CPU):
        group, rank, size, _ = _ops.library().dynemb_ranks_join_mpi(library, timeout)
        comm = Operators(group, int(rank), int(size))
        hosts = comm.gather_objects(socket.gethostname(), "dynemb/ranks/hosts")
    comm.local_rank = local_ranks(hosts)[comm.rank]
    return comm
