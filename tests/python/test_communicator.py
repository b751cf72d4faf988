"""The communicator in one process, with and without Horovod; tests/parallel has several ranks."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No Horovod has been imported, and horovodrun has not started the process."""
    monkeypatch.delitem(sys.modules, "horovod.tensorflow", raising=False)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)


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


@pytest.mark.parametrize("tool", ["mpi", "", "Horovod"])
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
