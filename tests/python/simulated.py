"""Whether the tests run with tables on a device: a simulated one or a GPU."""

import os

ENVIRONMENT = "TF_DYNEMB_SIMULATED_DEVICE"


def device_is_simulated() -> bool:
    """Whether tables on a device would be on a simulated one now; a test may change this."""
    return os.environ.get(ENVIRONMENT) == "1"


ON = device_is_simulated()
# Whether tables are on a GPU (tools/gpu_operators.sh), or the fake one (tools/fake_gpu.sh).
ON_GPU = os.environ.get("DYNEMB_TEST_ON_GPU") == "1"
# Whether tables are on a device: a simulated one, or a GPU.
ON_DEVICE = ON or ON_GPU
# The device memory of a table: so little that most tests use both tiers.
HBM_BYTES = 4096
# Modules that run a second time with tables on a device by default, because they test any table.
# Tests of the host's table, its sizes and its threads are not included.
MODULES = [
    "test_admission_option.py",
    "test_admission_saved.py",
    "test_apply_pooled.py",
    "test_dynamic_variable.py",
    "test_exchange_ops.py",
    "test_lookup_sparse.py",
    "test_ops.py",
    "test_ops_gradients.py",
    "test_ops_model.py",
    "test_capacity.py",
    "test_catch_up.py",
    "test_catch_up_saved.py",
    "test_checkpoint.py",
    "test_file_tables.py",
    "test_file_tables_catch_up.py",
    "test_file_tables_saved.py",
    "test_file_tables_sequences.py",
    "test_persistent_tables.py",
    "test_reproducible_rounding.py",
]
