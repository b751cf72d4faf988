"""The fake GPU sees faults: each of these processes must end, and say why."""

import os
import subprocess
import sys

import pytest

MESSAGE = "fake GPU: the host accesses the memory of the device"

TRAIN = """
import fake_gpu, op_helpers as h, tensorflow as tf
with tf.device("GPU:0"):
    table = h.make_table(tier="hybrid", shared_name="t")
    keys = tf.constant([3, 4, 5], tf.int64)
    h.ops.dynemb_lookup_counted(table, keys, tf.constant([1, 1, 1]), dtype=tf.float32)
    one = tf.constant(1, tf.int64)
    h.lookup_sparse([table], [keys], [one], [3], [4])
    h.apply_sgd([table], [tf.constant([3], tf.int64)], [tf.ones([1, 4])])
    print(h.size(table), "rows")
"""

READ = """
import ctypes, fake_gpu
library = ctypes.CDLL(fake_gpu.PATH)
library.FakeGpuAllocate.restype = ctypes.c_void_p
address = library.FakeGpuAllocate(ctypes.c_size_t(8))
print(ctypes.c_int64.from_address(address).value)
"""


def run(program, planted=""):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "FAKE_GPU_PLANT": planted, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_fault_nothing_is_seen():
    done = run(TRAIN)
    assert (done.returncode, done.stdout) == (0, "3 rows\n"), done.stderr
    assert MESSAGE not in done.stderr


@pytest.mark.parametrize(
    "planted",
    ["DynembLookupCounted.counts", "DynembApplyGradients.hyper", "DynembSize.size"],
)
def test_a_missing_host_memory_is_seen(planted):
    done = run(TRAIN, planted)
    assert done.returncode < 0, done.stderr
    assert MESSAGE in done.stderr, done.stderr


def test_an_access_by_the_host_is_seen():
    done = run(READ)
    assert done.returncode < 0, done.stderr
    assert MESSAGE in done.stderr, done.stderr
