"""The files of examples/launchers, with the variables that each launcher sets."""

import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "launchers"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="no sources: this tests a wheel"),
]

# In place of `python`: a training that ends soon.
PYTHON = """#!/bin/sh
exec {python} "$@" --epochs 1 --quiet --output-dir {folder}/output
"""

# Starts the tasks of a job step on this machine.
SRUN = """#!/bin/sh
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_STEP_NUM_TASKS=2 "$@" &
  pids="$pids $!"
done
for pid in $pids; do wait $pid || exit 1; done
"""


@pytest.fixture
def environment(tmp_path):
    """The variables of a shell that has the programs of `SRUN` and `PYTHON`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("python", PYTHON), ("srun", SRUN)):
        path = programs / name
        path.write_text(text.format(python=sys.executable, folder=tmp_path))
        path.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def check_trained(folder, output):
    """Checks that two ranks have trained one table: each wrote a shard of it."""
    (manifest,) = folder.rglob("MANIFEST.json")
    (table,) = json.loads(manifest.read_text())["tables"]
    assert len(table["shards"]) == 2, output
    assert all(shard["rows"] > 0 for shard in table["shards"])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_slurm(environment, tmp_path):
    script = (FOLDER / "slurm.sbatch").read_text()
    assert re.search(r"^#SBATCH --ntasks-per-node=\d+$", script, re.MULTILINE)
    environment |= {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
    }
    ended = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, timeout=300, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    check_trained(tmp_path, ended.stdout)


def test_kubeflow(environment, tmp_path):
    text = (FOLDER / "tfjob.yaml").read_text()
    command = re.search(r"command: \[(.*)\]", text)[1].split(", ")
    assert re.search(r"^kind: TFJob$", text, re.MULTILINE)
    assert {"Chief", "Worker"} <= set(re.findall(r"^    (\w+):", text, re.MULTILINE))
    environment["TF_DYNEMB_RANKS_SECRET"] = "of the job"
    # What the operator sets, for one worker beside the chief.
    cluster = {"chief": [f"127.0.0.1:{free_port()}"], "worker": ["127.0.0.1:2222"]}
    pods = []
    for kind in cluster:
        task = {"cluster": cluster, "task": {"type": kind, "index": 0}, "environment": "cloud"}
        variables = environment | {"TF_CONFIG": json.dumps(task)}
        pods.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    outputs = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(outputs)
    check_trained(tmp_path, "\n".join(outputs))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'ray[train]'")
def test_ray(environment):
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "ray_train.py"), "--workers", "2", "--samples", "1024"],
        env=environment, timeout=400, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    result = json.loads(re.search(r"trained: (\{.*\})", ended.stdout)[1])
    assert result["ranks"] == 2
    assert result["rows"] == 3376  # the distinct ids of all samples
