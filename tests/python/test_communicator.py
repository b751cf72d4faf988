"""The communicator in one process, with and without Horovod; tests/parallel has several ranks."""

from __future__ import annotations

import sys
import types

import certificates
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.ranks import start


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No Horovod has been imported, and horovodrun has not started the process."""
    monkeypatch.delitem(sys.modules, "horovod.tensorflow", raising=False)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    for name in ("HOROVOD_SIZE", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(start, "_joined", None)
    yield
    communicator.use(None)


class Horovod(types.ModuleType):
    """The functions of horovod.tensorflow that describe the ranks."""

    def __init__(self, rank, size):
        super().__init__("horovod.tensorflow")
        self.rank, self.size, self.local_rank = (lambda: rank), (lambda: size), (lambda: 0)
        self.initialized = 0

    def init(self):
        self.initialized += 1

    def is_initialized(self):
        return self.initialized > 0


@pytest.fixture
def install(monkeypatch):
    """Installs a fake Horovod."""

    def install(rank, size):
        horovod = Horovod(rank, size)
        package = types.ModuleType("horovod")
        package.tensorflow = horovod
        monkeypatch.setitem(sys.modules, "horovod", package)
        monkeypatch.setitem(sys.modules, "horovod.tensorflow", horovod)
        return horovod

    return install


def test_one_process_uses_the_local_communicator(capfd):
    de.init()
    assert communicator.get() is communicator.LOCAL
    assert "horovod" not in sys.modules
    assert capfd.readouterr() == ("", "")


def test_one_process_receives_its_own_messages():
    comm = communicator.get()
    assert (comm.rank, comm.size, comm.local_rank) == (0, 1, 0)
    tensor, splits = tf.constant([[1, 2], [3, 4]]), tf.constant([2], tf.int32)
    for got, given in zip(comm.alltoall(tensor, splits, "x"), (tensor, splits), strict=True):
        np.testing.assert_array_equal(got, given)
    (reduced,) = comm.allreduce([tensor], average=True, name="x")
    for got in (reduced, comm.allgather(tensor, "x"), comm.broadcast(tensor, 0, "x")):
        np.testing.assert_array_equal(got, tensor)
    assert comm.gather_objects({"a": [1]}, "x") == [{"a": [1]}]
    comm.barrier()


@pytest.mark.parametrize("started_by_horovodrun", [False, True])
def test_the_error_without_horovod_names_the_installer(monkeypatch, started_by_horovodrun):
    monkeypatch.setitem(sys.modules, "horovod", None)
    if started_by_horovodrun:
        monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(ImportError, match=r"`make horovod`.*tools/horovod\.sh install PYTHON"):
        de.init(None if started_by_horovodrun else "horovod")


@pytest.mark.parametrize("tool", ["MPI", "", "Horovod"])
def test_other_tools_set_up_nothing(tool, install):
    horovod = install(0, 2)
    with pytest.warns(UserWarning, match=f"comm_tool='{tool}' sets up no communication"):
        de.init(tool)
    assert horovod.initialized == 0


def test_version_of_tensorflow_as_in_sok():
    assert de.tf_version == [int(number) for number in tf.__version__.split("-")[0].split(".")]
    assert de.tf_version[0] == 2


def test_init_accepts_the_arguments_of_sok_scripts(install):
    horovod = install(0, 1)
    de.init(comm_tool="horovod", use_legacy_optimizer=True)
    assert horovod.initialized == 1


def test_init_of_one_process_with_the_installed_horovod():
    de.init(comm_tool="horovod")
    assert sys.modules["horovod.tensorflow"].size() == 1
    assert communicator.get().size == 1


def test_init_keeps_an_initialized_horovod(install):
    horovod = install(0, 1)
    horovod.init()
    de.init("horovod")
    assert horovod.initialized == 1


def test_init_under_horovodrun_initializes_horovod(install, monkeypatch):
    horovod = install(1, 2)
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    de.init()
    assert horovod.initialized == 1
    assert communicator.get().size == 2


def test_an_initialized_horovod_defines_the_ranks(install):
    horovod = install(1, 2)
    assert communicator.get() is communicator.LOCAL
    horovod.init()
    comm = communicator.get()
    assert (comm.rank, comm.size, comm.local_rank) == (1, 2, 0)
    assert communicator.get() is comm

    horovod = install(0, 1)
    horovod.init()
    assert communicator.get() is communicator.LOCAL


def test_a_horovod_from_other_sources_is_refused(install, monkeypatch):
    library = types.SimpleNamespace(get=lambda name: types.SimpleNamespace(is_stateful=False))
    monkeypatch.setattr(communicator, "op_def_registry", library)
    install(0, 2).init()
    with pytest.raises(RuntimeError, match=r"`make horovod`.*tools/horovod\.sh install PYTHON"):
        communicator.get()


class Joined(communicator._Local):
    """A group that an engine has joined."""

    def __init__(self, rank=0, size=2):
        self.rank, self.size, self.left = rank, size, 0

    def leave(self):
        self.left += 1


@pytest.fixture
def engines(monkeypatch):
    """Replaces the engines; returns the calls: the name of the engine, and its arguments."""
    calls = []

    def engine(name):
        def join(*arguments):
            calls.append((name, *arguments))
            return Joined(1, 4) if name == "mpi" else Joined()

        return join

    monkeypatch.setattr(start, "over_gloo", engine("gloo"))
    monkeypatch.setattr(start, "over_mpi", engine("mpi"))
    monkeypatch.setattr(start, "find_mpi", lambda environment: "libmpi.so.12")
    for name in (start.SECRET, *communicator.TLS_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return calls


def started(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_named_ranks_meet_by_gloo(engines, monkeypatch, caplog):
    started(monkeypatch, RANK="0", WORLD_SIZE="7")  # the arguments go before a launcher's variables
    caplog.set_level("INFO", "tf_dynemb")
    de.init(rank=1, size=np.int64(2), address="h:123", timeout=5)
    assert engines == [("gloo", 1, 2, "h", 123, 5.0, None, "", None)]
    assert isinstance(communicator.get(), Joined)
    assert "rank 0 of 2, from the arguments of init; by Gloo, met at h:123" in caplog.text
    with communicator.alone():
        assert communicator.get() is communicator.LOCAL


def test_launched_ranks(engines, monkeypatch):
    started(monkeypatch, RANK="1", WORLD_SIZE="4", MASTER_ADDR="m", MASTER_PORT="7")
    started(monkeypatch, TF_DYNEMB_RANKS_SECRET="s")
    de.init()
    assert engines == [("gloo", 1, 4, "m", 7, 600.0, "s", "", None)]


@pytest.mark.parametrize("tool", [None, "mpi"])
def test_ranks_of_mpiexec(engines, monkeypatch, tool):
    started(monkeypatch, PMI_RANK="1", PMI_SIZE="4")
    de.init(tool)
    assert engines == [("mpi", "libmpi.so.12", 600.0)]


def test_mpi_with_other_ranks_than_the_launcher(engines, monkeypatch):
    """Of another implementation: each process would be rank 0 of 1, and train alone."""
    started(monkeypatch, RANK="1", WORLD_SIZE="2")
    with pytest.raises(RuntimeError, match=r"1 of 2 according to RANK.*1 of 4 according to libmpi"):
        de.init("mpi")
    assert communicator.get() is communicator.LOCAL


def test_the_job_is_that_of_the_launcher(engines, monkeypatch):
    started(monkeypatch, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2", SLURM_JOB_ID="3001")
    started(monkeypatch, SLURM_STEP_ID="1", SLURM_STEP_NODELIST="n[1-2]")
    de.init()
    assert engines == [("gloo", 0, 2, "n1", 29502, 600.0, None, "3001 1", None)]


def test_ranks_of_mpiexec_without_its_library(engines, monkeypatch):
    monkeypatch.setattr(start, "find_mpi", lambda environment: None)
    started(monkeypatch, PMI_RANK="1", PMI_SIZE="4")
    with pytest.raises(RuntimeError, match=r"init\('mpi'\): no MPI library.*TF_DYNEMB_MPI"):
        de.init("mpi")
    de.init()
    assert engines == [("gloo", 1, 4, "127.0.0.1", 29500, 600.0, None, "", None)]


def test_ranks_of_horovodrun_by_another_engine(engines, monkeypatch):
    started(monkeypatch, HOROVOD_RANK="1", HOROVOD_SIZE="2")
    de.init("gloo")
    assert engines == [("gloo", 1, 2, "127.0.0.1", 29500, 600.0, None, "", None)]


def test_ranks_of_mpiexec_that_do_not_meet(engines, monkeypatch):
    def late(*arguments):
        raise TimeoutError("ranks 1 of 2 have not come")

    monkeypatch.setattr(start, "over_gloo", late)
    started(monkeypatch, PMI_RANK="0", PMI_SIZE="2")
    with pytest.raises(
        TimeoutError, match=r"^ranks 1 of 2 have.*mpiexec does not say.*MASTER_ADDR"
    ):
        de.init("gloo")
    assert communicator.get() is communicator.LOCAL


def test_nccl_is_beside_another_engine(engines, monkeypatch):
    started(monkeypatch, RANK="1", WORLD_SIZE="2")
    used = []
    monkeypatch.setattr(start, "use_nccl", lambda comm, required: used.append(required))
    de.init("nccl")
    assert engines == [("gloo", 1, 2, "127.0.0.1", 29500, 600.0, None, "", None)]
    assert used == [True]
    with pytest.raises(RuntimeError, match=r"init\('nccl'\): this process has joined.*'gloo'"):
        de.init("nccl")  # use_nccl has done nothing here
    start.leave()
    de.init()
    de.init("gloo")
    start.leave()
    de.init("gloo")
    assert used == [True, False]


def test_nccl_with_tls(engines, monkeypatch, tmp_path):
    """NCCL would send what was to be encrypted as it is."""
    files = certificates.Authority(tmp_path / "ca").rank()
    started(monkeypatch, RANK="1", WORLD_SIZE="2", **certificates.variables(files))
    monkeypatch.setattr(start, "use_nccl", lambda *_: pytest.fail("NCCL is used"))
    with pytest.raises(ValueError, match=r"TLS_CERTIFICATE.* would have no effect: 'nccl'"):
        de.init("nccl")
    assert engines == []
    de.init()
    assert len(engines) == 1


def test_nccl_without_a_gpu_is_an_error(engines, monkeypatch):
    left = []
    monkeypatch.setattr(Joined, "leave", lambda self: left.append(self))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
    started(monkeypatch, RANK="1", WORLD_SIZE="2")
    with pytest.raises(RuntimeError, match=r"init\('nccl'\): rank 0: TensorFlow sees no GPU"):
        de.init("nccl")
    assert len(left) == 1
    assert communicator.get() is communicator.LOCAL


def test_ranks_with_tls(engines, monkeypatch, caplog, tmp_path):
    files = certificates.Authority(tmp_path / "ca").rank()
    started(monkeypatch, RANK="1", WORLD_SIZE="4", **certificates.variables(files))
    caplog.set_level("INFO", "tf_dynemb")
    de.init()
    ((*_, encryption),) = engines
    assert encryption.operand()[1:] == list(files)
    assert "by Gloo, encrypted, met at" in caplog.text


def test_tls_that_is_incomplete(engines, monkeypatch):
    started(monkeypatch, RANK="1", WORLD_SIZE="4", TF_DYNEMB_RANKS_TLS_CA="ca.pem")
    with pytest.raises(ValueError, match=r"not set: TF_DYNEMB_RANKS_TLS_CERTIFICATE, .*_KEY"):
        de.init()
    assert engines == []


@pytest.mark.parametrize("tool", [None, "mpi"])
def test_mpi_with_tls(engines, monkeypatch, tool):
    """Otherwise ranks for which encryption was asked would be without it."""
    started(monkeypatch, PMI_RANK="1", PMI_SIZE="4", TF_DYNEMB_RANKS_TLS_CA="ca.pem")
    with pytest.raises(ValueError, match=r"TLS_CA would have no effect: 'mpi'.*init\('gloo'\)"):
        de.init(tool)
    assert engines == []


@pytest.mark.parametrize("how", ["init", "horovodrun", "the script"])
def test_horovod_with_tls(install, monkeypatch, how):
    horovod = install(0, 2)
    started(monkeypatch, TF_DYNEMB_RANKS_TLS_CA="ca.pem")
    if how == "horovodrun":
        started(monkeypatch, HOROVOD_SIZE="2")
    if how == "the script":
        horovod.init()
    starts = {
        "init": lambda: de.init("horovod"),
        "horovodrun": de.init,
        "the script": communicator.get,
    }
    with pytest.raises(ValueError, match="TLS_CA would have no effect: 'horovod'"):
        starts[how]()
    assert horovod.initialized == (how == "the script")


@pytest.mark.parametrize("tool", ["gloo", None])
def test_one_process_joins_nothing(engines, tool):
    de.init(tool)
    de.init(tool, rank=0, size=1, address="h:1")
    assert engines == []
    assert communicator.get() is communicator.LOCAL


def test_a_process_joins_once(engines, monkeypatch):
    started(monkeypatch, PMI_RANK="1", PMI_SIZE="4")
    de.init(rank=0, size=2, address="h:1")
    de.init("gloo", rank=0, size=2, address="h:1")
    assert len(engines) == 1
    with pytest.raises(RuntimeError, match=r"init\('mpi'\).*joined its ranks by 'gloo'"):
        de.init("mpi")
    joined = communicator.get()
    start.leave()
    assert joined.left == 1
    assert communicator.get() is communicator.LOCAL
    start.leave()
    de.init(rank=0, size=2, address="h:1")
    assert len(engines) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank, size and address must be given together, got rank=0"),
        ({"size": 2, "address": "h:1"}, ValueError, "must be given together"),
        ({"rank": 2, "size": 2, "address": "h:1"}, ValueError, "rank=2, size=2"),
        ({"rank": -1, "size": 2, "address": "h:1"}, ValueError, "rank=-1, size=2"),
        ({"rank": 0, "size": 0, "address": "h:1"}, ValueError, "rank=0, size=0"),
        ({"rank": 0.0, "size": 2, "address": "h:1"}, TypeError, "rank must be an integer, got 0.0"),
        (
            {"rank": 0, "size": True, "address": "h:1"},
            TypeError,
            "size must be an integer, got True",
        ),
        ({"rank": 0, "size": 2, "address": 29500}, TypeError, "address must be 'host:port'"),
        (
            {"rank": 0, "size": 2, "address": "h"},
            ValueError,
            "address must be 'host:port', got 'h'",
        ),
        ({"timeout": 0}, ValueError, "timeout must be in"),
        ({"timeout": float("nan")}, ValueError, "timeout must be in"),
        ({"timeout": "60"}, TypeError, "timeout must be a number of seconds, got '60'"),
        ({"comm_tool": 1}, TypeError, "comm_tool must be a string, got 1"),
        (
            {"comm_tool": "horovod", "rank": 0, "size": 2, "address": "h:1"},
            ValueError,
            "no effect on 'horovod'",
        ),
        (
            {"comm_tool": "mpi", "rank": 0, "size": 2, "address": "h:1"},
            ValueError,
            "no effect on 'mpi'",
        ),
    ],
)
def test_arguments_without_meaning(engines, arguments, error, message):
    with pytest.raises(error, match=message):
        de.init(**arguments)
    assert engines == []
