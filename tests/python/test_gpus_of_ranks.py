"""Which GPU a rank uses, and why ranks cannot use NCCL."""

import importlib.machinery
import importlib.util
import logging

import pytest
import tensorflow as tf

from tf_dynemb.ranks import gpus, launchers, libraries


class Devices:
    """A stand-in for the GPUs that tf.config knows."""

    def __init__(self, number, monkeypatch):
        self.all = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(number)
        ]
        self.visible, self.is_initialized = list(self.all), False
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: list(self.all))
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: list(self.visible))
        monkeypatch.setattr(tf.config, "set_visible_devices", self.set_visible)

    def set_visible(self, devices, _):
        if self.is_initialized:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = devices if isinstance(devices, list) else [devices]


@pytest.fixture
def devices(request, monkeypatch):
    return Devices(request.param, monkeypatch)


class TestChooseGpu:
    @pytest.mark.parametrize("devices", [4], indirect=True)
    @pytest.mark.parametrize(("local_rank", "number"), [(0, 0), (3, 3), (4, 0), (6, 2)])
    def test_each_rank_of_a_machine_has_another_one(self, devices, local_rank, number, caplog):
        caplog.set_level("INFO", "tf_dynemb")
        gpus.choose_gpu(local_rank)
        assert devices.visible == [devices.all[number]]
        assert f"this rank uses /physical_device:GPU:{number} of 4" in caplog.text

    @pytest.mark.parametrize("devices", [4], indirect=True)
    @pytest.mark.parametrize("chosen", [[0], [1, 2], []])
    def test_a_choice_of_the_script_stays(self, devices, chosen):
        devices.visible = [devices.all[i] for i in chosen]
        gpus.choose_gpu(3)
        assert devices.visible == [devices.all[i] for i in chosen]

    @pytest.mark.parametrize("devices", [4], indirect=True)
    def test_too_late(self, devices, caplog):
        devices.is_initialized = True
        gpus.choose_gpu(1)
        assert len(devices.visible) == 4
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "call init first" in caplog.text

    @pytest.mark.parametrize("devices", [0, 1], indirect=True)
    def test_nothing_to_choose(self, devices, caplog):
        gpus.choose_gpu(1)
        assert devices.visible == devices.all
        assert not caplog.records


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3),
        ({"MPI_LOCALRANKID": "2"}, 2),
        ({"SLURM_LOCALID": "1"}, 1),
        ({"LOCAL_RANK": "0"}, 0),
        # srun starts mpiexec, or a shell of it.
        ({"SLURM_LOCALID": "0", "MPI_LOCALRANKID": "5"}, 5),
        ({"RANK": "1"}, None),
    ],
)
def test_local_rank_of_a_launcher(environment, number):
    assert launchers.local_rank(environment) == number


def test_a_local_rank_that_is_no_number():
    with pytest.raises(ValueError, match="LOCAL_RANK='a' is not an integer"):
        launchers.local_rank({"LOCAL_RANK": "a"})


class TestNameOfGpu:
    @pytest.mark.parametrize("devices", [2], indirect=True)
    @pytest.mark.parametrize(
        ("visible", "name"),
        [(None, "1"), ("", "1"), ("4,6", "6"), ("GPU-a, GPU-b", "GPU-b"), ("5", "1")],
    )
    def test_is_that_of_cuda(self, devices, visible, name):
        """CUDA_VISIBLE_DEVICES renumbers GPUs: two ranks may both call theirs number 0."""
        devices.visible = devices.all[1:]
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert gpus._gpu(environment)[1] == name

    @pytest.mark.parametrize("devices", [0], indirect=True)
    def test_without_one(self, devices):
        assert gpus._gpu({}) is None


class TestObstacle:
    def test_none(self):
        said = [[["a", "0"], None], [["a", "1"], None], [["b", "0"], None]]
        assert gpus._obstacle(said) is None

    def test_the_first_rank_with_a_problem(self):
        said = [[["a", "0"], None], [None, "TensorFlow sees no GPU"], [["a", "0"], "other"]]
        assert gpus._obstacle(said) == "rank 1: TensorFlow sees no GPU"

    def test_two_ranks_on_one_gpu(self):
        said = [[["a", "0"], None], [["b", "0"], None], [["a", "0"], None]]
        assert gpus._obstacle(said) == "ranks 0 and 2 have the same GPU, 0 of a"


class TestFindNccl:
    def test_the_variable_names_it(self):
        assert libraries.find_nccl({"TF_DYNEMB_NCCL": "/a/b.so"}) == "/a/b.so"

    def test_that_of_the_package(self, tmp_path, monkeypatch):
        library = tmp_path / "nccl" / "lib" / "libnccl.so.2"
        library.parent.mkdir(parents=True)
        library.touch()
        spec = importlib.machinery.ModuleSpec("nvidia.nccl", None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path / "nccl")]
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        assert libraries.find_nccl({}) == str(library)

    def test_nowhere(self, monkeypatch):
        def missing(name):
            raise ModuleNotFoundError("No module named 'nvidia'")

        monkeypatch.setattr(importlib.util, "find_spec", missing)
        monkeypatch.setattr(libraries, "_NCCL", "no_such_library.so.2")
        assert libraries.find_nccl({}) is None
