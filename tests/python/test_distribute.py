"""Under tf.distribute, several replicas are an error that names Horovod; one replica works."""

import pytest
from dump_helpers import run_script


@pytest.fixture(scope="module")
def errors():
    return run_script("distribute_strategies.py")


@pytest.mark.parametrize(
    "call", ["table", "model", "lookup", "embedding_lookup", "lookup_sparse", "optimizer"]
)
def test_several_replicas_are_an_error(errors, call):
    assert errors[call] is not None
    assert "MirroredStrategy with 2 replicas" in errors[call]
    assert "tf-dynemb run" in errors[call]


@pytest.mark.parametrize("strategy", ["MirroredStrategy", "OneDeviceStrategy"])
def test_one_replica_trains(errors, strategy):
    assert errors[strategy] is None
