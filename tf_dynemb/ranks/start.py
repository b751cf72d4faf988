"""`init`: joins the ranks that train together."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from tf_dynemb import communicator
from tf_dynemb.communicator import SECRET
from tf_dynemb.ranks import tls
from tf_dynemb.ranks.engines import over_gloo, over_mpi
from tf_dynemb.ranks.gpus import choose_gpu, use_nccl
from tf_dynemb.ranks.launchers import Place, find, job, split_address
from tf_dynemb.ranks.libraries import find_mpi
from tf_dynemb.ranks.operators import Operators

ENGINES = ("gloo", "mpi", "nccl", "horovod")

_log = logging.getLogger("tf_dynemb")


def init(
    comm_tool: str | None = None,
    use_legacy_optimizer: bool = False,
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    timeout: float = 600,
) -> None:
    """Joins the ranks that train together: all that a launcher has started, or that are named here.

    The call is optional in one process, and if the script calls `hvd.init()` itself. A process can
    join once; another call has no effect, unless it names another engine. All ranks call it.

    The variables of these launchers say how many ranks there are, and which one this is, in this
    order: `rank`, `size` and `address`; horovodrun; TF_CONFIG with several workers (Kubeflow,
    Vertex AI, Ray); RANK and WORLD_SIZE (`tf-dynemb run`, torchrun); mpiexec; srun. Without any of
    them there is one process, and nothing is set up. The choice is logged at level INFO by the
    logger "tf_dynemb".

    Args:
        comm_tool: the engine that carries tensors between ranks.
            "gloo": sockets, between all launchers' ranks. It is part of this package.
            "mpi": the MPI library of `mpiexec` (MPICH, Open MPI and their relatives), which must
            grant MPI_THREAD_MULTIPLE. TF_DYNEMB_MPI names the library if it is not found.
            "nccl": "mpi" or "gloo", and NCCL for the exchanges of tables in GPU memory. Each rank
            needs another GPU. TF_DYNEMB_NCCL names the library if it is not found.
            "horovod": Horovod, in ranks that horovodrun has started.
            None: "horovod" under horovodrun; "mpi" under mpiexec, if its library is found;
            otherwise "gloo". The last two with NCCL, if all ranks can use it.
            Any other name sets up no communication, as in SOK, and is warned of.
        use_legacy_optimizer: SOK's argument, without effect: Keras 3 has no legacy optimizers.
        rank: the number of this process, from 0. With `size` and `address`, instead of a launcher's
            variables.
        size: the number of ranks.
        address: "host:port" at which rank 0 listens while the ranks meet, on an address that all of
            them reach. If all run on one machine, "127.0.0.1:29500" or another free port. Ranks
            then connect to each other at ports that the system chooses. If TF_DYNEMB_RANKS_SECRET
            is set, rank 0 admits only ranks that know it. If TF_DYNEMB_RANKS_TLS_CERTIFICATE, _KEY
            and _CA are set, Gloo's ranks show each other certificates, and all that they send is
            encrypted.
        timeout: the seconds after which a rank that has not come, or that other ranks wait for in a
            collective operation, is an error on all of them. A rank that ends is one at once.
            Horovod has its own settings.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `rank`, `size` and `address` are incomplete or out of range, or a launcher's
            variable has no meaning; the message names it. Or the variables of TLS are incomplete,
            name files that cannot be used, or are set for an engine other than Gloo.
        ImportError: Horovod is required and not installed; the message says how to install it.
        RuntimeError: this process has joined ranks by another engine; "mpi" is required and its
            library is not found; MPI has other ranks than the launcher; or "nccl" is required and
            a rank cannot use it.
        TimeoutError: ranks have not come; the message names them.
        OSError: rank 0 cannot listen at the address, or has refused this process.
        tf.errors.AbortedError: two ranks cannot connect; the message names them. Or MPI has not
            started on all ranks in time.
    """
    if comm_tool is not None and not isinstance(comm_tool, str):
        raise TypeError(f"comm_tool must be a string, got {comm_tool!r}.")
    if comm_tool is not None and comm_tool not in ENGINES:
        warnings.warn(
            f"comm_tool={comm_tool!r} sets up no communication; {', '.join(ENGINES)} do.",
            stacklevel=2,
        )
        return
    timeout = _seconds(timeout)
    place = _named(rank, size, address)
    if comm_tool in ("horovod", "mpi") and place is not None:
        raise ValueError(
            f"rank, size and address have no effect on {comm_tool!r}, whose launcher numbers the "
            "ranks."
        )
    if place is None and comm_tool in (None, "horovod") and _is_horovods(comm_tool):
        communicator.horovod_ranks()
        ranks = communicator.get()
        if ranks.size > 1:
            choose_gpu(ranks.local_rank)
        return
    place = place or find(os.environ)
    if place is None:
        return
    engine, library = _engine(comm_tool, place)
    global _joined
    if _joined is not None:
        if _joined[0] != engine or (comm_tool == "nccl" and not _joined[1].alltoall_on_gpu):
            raise RuntimeError(
                f"init({comm_tool!r}): this process has joined its ranks by {_joined[0]!r}."
            )
        return
    if place.size == 1:
        return
    for name in (engine, comm_tool):
        if name in ("mpi", "nccl"):
            communicator.refuse_tls(name)
    encryption = tls.find(os.environ)
    if engine == "mpi":
        comm, by = _join_by_mpi(place, str(library), timeout)
    else:
        comm, by = _join_by_gloo(place, timeout, encryption)
    # NCCL would send in the clear what is to be encrypted.
    if comm_tool == "nccl" or (comm_tool is None and encryption is None):
        try:
            use_nccl(comm, comm_tool == "nccl")
        except RuntimeError:
            comm.leave()
            raise
    communicator.use(comm)
    _joined = engine, comm
    _log.info("rank %d of %d, from %s; by %s", comm.rank, comm.size, place.launcher, by)


def _join_by_mpi(place: Place, library: str, timeout: float) -> tuple[Operators, str]:
    """Returns the communicator, and how the ranks are connected, for the log."""
    comm = over_mpi(library, timeout)
    if (comm.rank, comm.size) != (place.rank, place.size):
        comm.leave()
        raise RuntimeError(
            f"This is rank {place.rank} of {place.size} according to {place.launcher}, but rank "
            f"{comm.rank} of {comm.size} according to {library}: the launcher belongs to another "
            "MPI. Set TF_DYNEMB_MPI to its library, or call init('gloo'), which needs none."
        )
    return comm, f"MPI ({library})"


def _join_by_gloo(
    place: Place, timeout: float, encryption: tls.Tls | None
) -> tuple[Operators, str]:
    """Returns the communicator, and how the ranks are connected, for the log."""
    host = place.host or "127.0.0.1"
    secret = os.environ.get(SECRET)
    try:
        comm = over_gloo(
            *(place.rank, place.size, host, place.port),
            *(timeout, secret, job(os.environ), encryption),
        )
    except TimeoutError as error:
        if place.host is not None:
            raise
        raise TimeoutError(
            f"{error}. {place.launcher} does not say where rank 0 is: if the ranks are not all "
            "on this machine, set MASTER_ADDR to the name of rank 0's on all of them"
        ) from error
    return comm, f"Gloo{', encrypted' if encryption else ''}, met at {host}:{place.port}"


# The engine that `init` has set up, and its communicator.
_joined: tuple[str, Operators] | None = None


def leave() -> None:
    """Leaves the ranks that `init` has joined by Gloo or MPI; `init` can then join others."""
    global _joined
    if _joined is not None:
        _joined[1].leave()
    _joined = None
    communicator.use(None)


def _is_horovods(comm_tool: str | None) -> bool:
    return comm_tool == "horovod" or "HOROVOD_SIZE" in os.environ


def _named(rank: Any, size: Any, address: Any) -> Place | None:
    """Returns the place that the arguments name; None if there are none."""
    if rank is None and size is None and address is None:
        return None
    if rank is None or size is None or address is None:
        raise ValueError(
            f"rank, size and address must be given together, got rank={rank!r}, size={size!r}, "
            f"address={address!r}."
        )
    for name, value in (("rank", rank), ("size", size)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {value!r}.")
    if not isinstance(address, str):
        raise TypeError(f"address must be 'host:port', got {address!r}.")
    rank, size = rank.__index__(), size.__index__()
    if not 0 <= rank < size < 2**31:
        raise ValueError(f"rank must be in [0, size), got rank={rank}, size={size}.")
    host, port = split_address(address)
    return Place(rank, size, host, port, "the arguments of init")


def _engine(comm_tool: str | None, place: Place) -> tuple[str, str | None]:
    """Returns the engine for these ranks, and the MPI library if it is "mpi"."""
    if comm_tool == "gloo":
        return "gloo", None
    library = find_mpi(os.environ) if comm_tool == "mpi" or place.mpi else None
    if comm_tool == "mpi" and library is None:
        raise RuntimeError(
            "init('mpi'): no MPI library was found beside mpiexec, in this Python's folders or by "
            "the loader: `pip install mpich`, or set TF_DYNEMB_MPI to one."
        )
    return ("mpi", library) if library is not None else ("gloo", None)


def _seconds(timeout: Any) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}.")
    if not 0 < timeout <= 1e9:
        raise ValueError(f"timeout must be in (0, 1e9] seconds, got {timeout!r}.")
    return float(timeout)
