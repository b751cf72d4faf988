"""The fake GPU, for pytest -p fake_gpu: loads the library in FAKE_GPU_LIBRARY (make fake-gpu).

The operators of tf_dynemb then come from that library, and TensorFlow has the device GPU:0.
"""

import os

import pytest
import tensorflow as tf
from tensorflow.python.framework import load_library

PATH = os.environ["FAKE_GPU_LIBRARY"]
# Each rank has another GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("RANK", "0")
# Tests that need kernels of TensorFlow's own on a GPU, which its build for the CPU lacks, and one
# that takes a minute.
LEFT_OUT = (
    "test_catch_up.py::test_long_gaps",
    "test_dynamic_variable.py::test_tables_are_arguments_of_functions",
    "test_lookup_sparse.py::test_dynamic_and_static_tables_in_one_call",
    "test_lookup_sparse.py::test_max_norm_is_as_in_tensorflow",
)
# The same, and tests that only take longer.
LEFT_OUT_OF_RANKS = (
    "global_clipnorm",
    "long",
    "nadam",
    "other_optimizers",
    "test_an_overflow_on_one_rank_only",
    "test_a_matrix_that_two_features_read",
    "test_repeated_ids_of_a_static_table",
)


def load(path):
    """Loads the operators and the device, in this order: TensorFlow wants to see both register.

    Call before tf_dynemb loads its operators, and before TensorFlow lists its devices.
    """
    operators = tf.load_op_library(path)
    load_library.load_pluggable_device_library(path)
    load_op_library = tf.load_op_library

    def load_other(name):
        return operators if "_dynemb_ops" in name else load_op_library(name)

    tf.load_op_library = load_other
    if not tf.config.list_physical_devices("GPU"):
        raise RuntimeError(f"{path} is loaded, but TensorFlow sees no GPU")


def on_the_cpu(next_creator, **options):
    """Creates a variable of TensorFlow's own on the CPU, which has the kernels for it."""
    with tf.device("CPU:0"):
        return next_creator(**options)


def is_left_out(item):
    name, _, case = item.nodeid.partition("[")
    if "/ranks/" in name:  # two ranks by Gloo or NCCL; one rank covers the other optimizers
        return not case.startswith(("np2", "nccl-np2")) or any(
            text in item.nodeid for text in LEFT_OUT_OF_RANKS
        )
    return name.endswith(LEFT_OUT)


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    with tf.variable_creator_scope(on_the_cpu):
        return (yield)


load(PATH)
