"""The place of a process among the ranks, from the variables of each launcher."""

from __future__ import annotations

import json

import pytest

from tf_dynemb.ranks.launchers import PORT, Place, find, first_host, local_ranks, split_address


def tf_config(kind, index, **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


WORKERS = ["a:2222", "b:2223", "b:2224"]


@pytest.mark.parametrize(
    ("environment", "rank", "size", "host", "port", "mpi"),
    [
        (tf_config("worker", 0, worker=WORKERS), 0, 3, "a", 2222, False),
        (tf_config("worker", "2", worker=WORKERS), 2, 3, "a", 2222, False),
        # The chief is the first worker.
        (tf_config("chief", 0, worker=WORKERS, chief=["c:1"]), 0, 4, "c", 1, False),
        (
            tf_config("worker", 1, worker=WORKERS, chief=["c:1"], evaluator=["d:2"]),
            2,
            4,
            "c",
            1,
            False,
        ),
        (tf_config("worker", 0, worker=["[::1]:5", "x:6"]), 0, 2, "::1", 5, False),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "m", "MASTER_PORT": "77"},
            *(1, 4, "m", 77, False),
        ),
        # torchrun's agent has the port itself.
        (
            {
                "RANK": "1",
                "WORLD_SIZE": "4",
                "MASTER_ADDR": "m",
                "MASTER_PORT": "77",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            *(1, 4, "m", 78, False),
        ),
        ({"RANK": "1", "WORLD_SIZE": "4"}, 1, 4, None, PORT, False),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, 2, 3, None, PORT, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "m"}, 0, 2, "m", PORT, True),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_JOB_ID": "1234567",
                "SLURM_STEP_NODELIST": "gpu[03-07,9],login",
                "SLURM_NTASKS": "8",
            },
            *(5, 8, "gpu03", PORT + 1234567 % 3000, False),
        ),
        # mpiexec of MPICH under srun.
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "PMI_RANK": "3",
                "PMI_SIZE": "4",
            },
            *(3, 4, None, PORT, True),
        ),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, 1, 2, None, PORT, False),
    ],
)
def test_launchers(environment, rank, size, host, port, mpi):
    place = find(environment)
    assert place == Place(rank, size, host, port, place.launcher, mpi)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0"},
        {"WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        # A script of sbatch is one process of a job with several tasks.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        tf_config("worker", 0, worker=["a:1"]),
        tf_config("evaluator", 0, worker=WORKERS, evaluator=["e:1"]),
        tf_config("ps", 0, worker=WORKERS, ps=["p:1"]),
    ],
)
def test_one_process(environment):
    assert find(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 of 2"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "rank 1 of 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set, and RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"}, "MASTER_PORT=65536 leads to"),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_PORT": "65535",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            "MASTER_PORT=65535 leads to",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1"},
            "not a list of nodes",
        ),
        ({"TF_CONFIG": "{"}, "TF_CONFIG"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG"),
        (tf_config("worker", 3, worker=WORKERS), "TF_CONFIG"),
        (tf_config("worker", 0, worker=["a", "b"]), "TF_CONFIG.*host:port"),
        (
            {"TF_CONFIG": json.dumps({"cluster": {"worker": WORKERS}, "task": {"type": "worker"}})},
            "TF_CONFIG",
        ),
    ],
)
def test_variables_without_meaning(environment, message):
    with pytest.raises(ValueError, match=message):
        find(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("n[007,9-11],m3", "n007"),
        ("rack[2-3]node,x", "rack2node"),
        ("rack[0-1]node[2,4],x", "rack0node2"),
        ("a-b.c[10-12]", "a-b.c10"),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:0", "host:65536", "host:-1", "h:1x"]
)
def test_addresses_without_meaning(address):
    with pytest.raises(ValueError, match="address must be 'host:port'"):
        split_address(address)


def test_local_ranks():
    assert local_ranks(["a", "b", "a", "a", "b"]) == [0, 0, 1, 2, 1]
    assert local_ranks([]) == []
