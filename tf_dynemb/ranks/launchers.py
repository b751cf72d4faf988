"""The place of this process among the ranks, from the variables that its launcher has set."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The port of the rendezvous, unless a variable or an argument names one: that of torchrun.
PORT = 29500


class Place(NamedTuple):
    """A process among the ranks.

    Attributes:
        rank: its number, from 0.
        size: the number of ranks.
        host: a name of rank 0's machine; None if the launcher does not say it.
        port: the port of the rendezvous on that machine.
        launcher: the launcher that has started the ranks, for messages.
        mpi: whether it is a launcher of MPI programs.
    """

    rank: int
    size: int
    host: str | None
    port: int
    launcher: str
    mpi: bool = False


# Launchers whose variables are a rank and a number of ranks. torchrun and `tf-dynemb run` set
# RANK. An outer launcher comes after those that it may start, such as torchrun or mpiexec by srun.
_VARIABLES = (
    ("RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", False),
    ("Open MPI's mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", True),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", True),
    # Of the job step: a script of sbatch has the job's variables, but is one process.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", False),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", False),
)


def find(environment: Mapping[str, str]) -> Place | None:
    """Returns the place of this process; None if no launcher has started several ranks.

    Raises:
        ValueError: a variable has no meaning; the message names it.
    """
    place = _of_tf_config(environment)
    if place is not None:
        return place
    for launcher, rank, size, mpi in _VARIABLES:
        if rank in environment and size in environment:
            numbers = _number(environment, rank), _number(environment, size)
            if not 0 <= numbers[0] < numbers[1]:
                raise ValueError(f"{launcher} says that this is rank {numbers[0]} of {numbers[1]}.")
            if numbers[1] > 1:
                return Place(*numbers, *_address(environment), launcher, mpi)
    if "RANK" not in environment and environment.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"WORLD_SIZE={environment['WORLD_SIZE']!r} is set, and RANK, which says which rank "
            "this is, is not."
        )
    return None


def _of_tf_config(environment: Mapping[str, str]) -> Place | None:
    """The variable of Kubeflow's TFJob, Vertex AI and Ray, and of tf.distribute."""
    text = environment.get("TF_CONFIG")
    if not text:
        return None
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster", {}), config.get("task", {})
        # As in TensorFlow, the chief is the first of the workers.
        workers = [
            (kind, index, address)
            for kind in ("chief", "worker")
            for index, address in enumerate(cluster.get(kind, ()))
        ]
        places = [(kind, index) for kind, index, _ in workers]
        if len(workers) < 2 or task.get("type") not in ("chief", "worker"):
            return None
        rank = places.index((task["type"], int(task["index"])))
        host, port = split_address(workers[0][2])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"TF_CONFIG={text!r} does not describe a cluster: {error!r}") from error
    return Place(rank, len(workers), host, port, "TF_CONFIG")


def _address(environment: Mapping[str, str]) -> tuple[str | None, int]:
    host = environment.get("MASTER_ADDR")
    if "MASTER_PORT" in environment:
        # torchrun's agent may listen at this port itself.
        taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = _number(environment, "MASTER_PORT") + taken
        if not 0 < port < 2**16:
            raise ValueError(f"MASTER_PORT={environment['MASTER_PORT']} leads to no port.")
        return host, port
    port = PORT
    if "SLURM_JOB_ID" in environment:  # several jobs may share a machine
        step = environment.get("SLURM_STEP_ID", "0")
        jobs = _number(environment, "SLURM_JOB_ID") + (int(step) if step.isdecimal() else 0)
        port += jobs % 3000  # below the ports that systems choose
    if host is None and "SLURM_STEP_NODELIST" in environment:
        host = first_host(environment["SLURM_STEP_NODELIST"])
    return host, port


def first_host(nodes: str) -> str:
    """Returns the first name of a list of Slurm, such as "gpu[03-07,9]x[1-2],login1"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    name = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else "")
    if first is None or not name or nodes[first.end() :].startswith("["):
        raise ValueError(f"{nodes!r} is not a list of nodes.")
    return name


# What tells the ranks of one job from those of another that meet at the same port.
_JOBS = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMI_JOBID",),
)


def job(environment: Mapping[str, str]) -> str:
    """Returns the name that the launcher has given to the job, the same on all ranks; or ""."""
    for names in _JOBS:
        if names[0] in environment:
            return " ".join(environment.get(name, "") for name in names)
    return ""


def split_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of "host:port" or "[IPv6]:port".

    Raises:
        ValueError: it is no such address.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"address must be 'host:port', got {address!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"{name}={environment[name]!r} is not an integer.") from None


# The number of a process among those on its machine: `mpiexec` of Open MPI, and of MPICH and Intel
# MPI; `srun`; torchrun.
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "LOCAL_RANK")


def local_rank(environment: Mapping[str, str]) -> int | None:
    """Returns the number of this process among those on its machine; None if no variable says it.

    Raises:
        ValueError: a variable is not a number; the message names it.
    """
    name = next((name for name in _LOCAL_RANKS if name in environment), None)
    return None if name is None else _number(environment, name)


def local_ranks(hosts: Sequence[str]) -> list[int]:
    """Returns the number of each rank among those on its machine, from the names of machines."""
    return [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
