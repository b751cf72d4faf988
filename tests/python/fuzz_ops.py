"""Calls every operator with malformed input. test_ops_fuzz.py runs this in a separate process.

Each call is a valid call with some arguments replaced by garbage; it must return or raise. Prints a
line of JSON per operator, with the numbers of calls and failures, and a line of the errors of calls
that were valid and of internal errors.
"""

import collections
import faulthandler
import json
import sys
import tempfile
import zlib

import numpy as np
import op_helpers as h
import tensorflow as tf
from op_helpers import ops
from operator_calls import operator_calls
from operator_values import BAGS, DIM, IDS, Values
from valid_call import run_eagerly, run_in_graph

faulthandler.enable()
HUGE = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1)
NEGATIVE = (-1, -2, -(2**31), -(2**40), -(2**63))
RIGHT_CALLS = 12  # per operator, before the malformed ones
# Excludes legal sizes that take minutes or much memory.
CAPACITIES = (0, 1, 7, 1000, 2**40, 2**62, 2**63 - 1, *NEGATIVE)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-45, 3e38, -3e38, 2.0)
TYPES = (tf.int64, tf.int32, tf.uint64, tf.float32, tf.float16, tf.bfloat16, tf.uint32, tf.bool,
         tf.string, tf.int8, tf.float64)  # fmt: skip

FOLDER = tempfile.TemporaryDirectory()  # until the process ends


class Garbage:
    """Random input that fits no particular argument."""

    def __init__(self, rng):
        self.rng = rng
        self.variable = tf.Variable(tf.zeros([5, DIM]))
        initializer = tf.lookup.KeyValueTensorInitializer([1], [2])
        self.other_table = tf.lookup.StaticHashTable(initializer, 0)
        self.others = [
            self.variable.handle,
            self.other_table.resource_handle,
            h.make_table(DIM, tf.int32),
            h.make_table(DIM + 1),
            h.make_table(DIM, tf.int64, tf.float16),
            h.make_table(DIM, max_capacity=2, init_capacity=1, evict_strategy="none"),
            tf.stack([h.make_table(DIM)] * 2),
            tf.stack([self.variable.handle])[:0],
        ]
        destroyed = h.make_table(DIM, shared_name="destroyed")
        tf.raw_ops.DestroyResourceOp(resource=destroyed)
        self.others.append(destroyed)

    def pick(self, choices):
        return choices[self.rng.integers(len(choices))]

    def integer(self):
        return int(self.pick([*HUGE, *NEGATIVE, 0, 1, 2, 3, 5, int(self.rng.integers(-9, 99))]))

    def shape(self):
        rank = int(self.pick([0, 1, 1, 2, 2, 3, 5, 20]))
        most = 4 if rank < 4 else 2
        shape = [int(n) for n in self.rng.integers(0, 1 + most, rank)]
        if rank >= 2 and self.rng.random() < 0.15:  # empty, but with a huge dimension
            shape = [0, *shape[1:]]
            shape[-1] = int(self.pick([2**20 + 1, 2**31, 2**40, 2**61]))
            self.rng.shuffle(shape)
            if 0 not in shape[:2]:
                shape[0] = 0
        return shape

    def values(self, dtype, shape):
        if 0 in shape:
            return tf.zeros(shape, dtype)
        if dtype == tf.string:
            return tf.fill(shape, "x")
        if dtype == tf.bool:
            return tf.zeros(shape, tf.bool)
        if dtype.is_integer:
            low, high = dtype.min, dtype.max
            wide = self.rng.integers(low, high, shape, dtype.as_numpy_dtype, endpoint=True)
            small = self.rng.integers(0, 8, shape).astype(dtype.as_numpy_dtype)
            return tf.constant(np.where(self.rng.random(shape) < 0.5, wide, small), dtype)
        chosen = self.rng.choice(FLOATS, shape)
        return tf.cast(np.where(self.rng.random(shape) < 0.7, 1.0, chosen), dtype)

    def tensor(self):
        return self.values(self.pick(TYPES), self.shape())

    def like(self, right):
        """Returns garbage to replace `right`, often with the same type or shape."""
        if not isinstance(right, tf.Tensor):
            return self.tensor()
        if right.dtype == tf.resource:
            return self.tensor() if self.rng.random() < 0.1 else self.pick(self.others)
        how = self.rng.random()
        if how < 0.4:
            return self.values(right.dtype, right.shape.as_list())
        if how < 0.75:
            if right.shape.rank == 0 and right.dtype == tf.int64 and self.rng.random() < 0.8:
                return tf.constant(self.integer(), tf.int64)
            return self.values(right.dtype, self.shape())
        if how < 0.9:
            return self.values(self.pick(TYPES), right.shape.as_list())
        return self.tensor()

    def bags(self, right):
        n, b = IDS, BAGS
        return self.pick([
            tf.constant(self.integer(), tf.int64),
            tf.constant(self.rng.integers(-2, b + 2, [n, 2]), tf.int64),
            tf.constant(self.rng.integers(0, b, [n, 1]), tf.int64),
            tf.zeros([n, 0], tf.int64),
            tf.constant(self.rng.integers(-2, n + 2, [b + 1]), tf.int64),
            tf.constant([0, *np.sort(self.rng.integers(0, n + 1, b - 1)), n], tf.int64),
            tf.constant([0, n, 2, n], tf.int64),
            tf.constant([0, 2**62, -(2**62), n], tf.int64),
            tf.constant([-5, 0, 0, n], tf.int64),
            tf.constant([0] * b + [self.integer()], tf.int64),
            tf.constant([], tf.int64),
            self.like(right),
        ])  # fmt: skip

    def attribute(self, name, right):
        if name in ("dim", "dims"):
            value = self.pick([0, 3, DIM, DIM + 1, *NEGATIVE, 2**31, 2**40, 2**63 - 1])
            return self.pick([[], [value], [DIM, value]]) if name == "dims" else value
        if "capacity" in name:
            return int(self.pick(CAPACITIES))
        if name in ("dtype", "key_dtype", "key_type"):
            return self.pick(TYPES)
        if name in ("initializer_args", "inits"):
            n = self.rng.integers(0, 5)
            return [float(x) for x in self.rng.choice(FLOATS, n)]
        if name == "widths":
            n = self.rng.integers(0, 4)
            return [int(self.pick([0, 1, 4, 2**20 + 1, *HUGE, *NEGATIVE])) for _ in range(n)]
        if name in ("combiners", "flags", "initializers"):
            words = ["sum", "mean", "max", "sqrtn", "min", "", "normal", "uniform", "constant",
                     "truncated_normal", "momentum", "nesterov", "amsgrad", "centered"]  # fmt: skip
            return [str(w) for w in self.rng.choice(words, self.rng.integers(0, 4))]
        if name == "T":  # small: TensorFlow creates this number of outputs
            return int(self.rng.integers(0, 4))
        if name in ("tables", "owners"):
            return [self.integer() for _ in range(self.rng.integers(0, 4))]
        if name in ("wire", "names"):
            words = ["same", "int8", "float16", "bfloat16", ""]
            return [str(w) for w in self.rng.choice(words, self.rng.integers(0, 4))]
        if name in ("dtypes", "row_dtypes", "Tkeys"):
            return [self.pick(TYPES) for _ in range(self.rng.integers(0, 3))]
        if name == "shapes":
            return [self.shape() for _ in range(self.rng.integers(0, 3))]
        if isinstance(right, bool):
            return self.pick([not right, not right, 7, None])
        if isinstance(right, float):
            return self.pick(FLOATS)
        if isinstance(right, int):
            return self.integer()
        words = ("", "sgd", "adam", "rowwise_adagrad", "ftrl", "x" * 1000, "none", "lru", None)
        return self.pick(words)


# Without these, no call would succeed.
KEPT = ("handle", "handles", "others", "snapshot", "bags", "num_bags", "descriptor", "path")
KEPT += ("folder", "group")


def spoil(garbage, inputs, attributes):
    """Replaces one to three of the arguments, or only the contents of tensors.

    Wrong `rows` and `argmax`, which other operators produce, may give wrong results, but must not
    break memory safety.
    """
    inputs, attributes = dict(inputs), dict(attributes)
    if garbage.rng.random() < 0.3:
        for name, right in inputs.items():
            if name not in KEPT:
                inputs[name] = tf.nest.map_structure(
                    lambda t: garbage.values(t.dtype, t.shape.as_list()), right
                )
        return inputs, attributes
    names = [*inputs, *attributes]
    for name in garbage.rng.choice(names, garbage.rng.integers(1, 4)):
        if name in attributes:
            attributes[name] = garbage.attribute(name, attributes[name])
        elif isinstance(inputs[name], list):
            one = garbage.bags if name == "bags" else garbage.like
            count = garbage.pick([0, 1, 1, 1, 1, 1, 1, 2])
            right = inputs[name][0] if inputs[name] else None
            inputs[name] = [one(right) for _ in range(count)]
        else:
            inputs[name] = garbage.like(inputs[name])
    return inputs, attributes


def touch(result):
    for tensor in tf.nest.flatten(result):
        if isinstance(tensor, tf.Tensor) and tensor.dtype != tf.resource:
            tensor.numpy()


def right_calls(rng, call):
    """Returns a valid call of each operator: (name, operator, inputs, attributes).

    They share a table, which is also returned. Each finds it as the calls before left it.
    """
    values = Values(
        FOLDER.name, seed=int(rng.integers(2**32)), tables=int(rng.integers(1, 3)),
        combiner=str(rng.choice(["sum", "mean", "sqrtn", "max"])),
        wire=str(rng.choice(["same", "float16", "bfloat16", "int8"])),
        form=str(rng.choice(["uniform", "splits", "indices"])),
    )  # fmt: skip
    if call % 3 == 0:  # most rows in files
        values.table = values.table_in_files(init_capacity=1)
        for first in range(0, 300, 60):
            h.lookup(values.table, np.arange(first, first + 60))
    calls = operator_calls(values.tables)
    return [(call.name, call.operator, *call.arguments(values)) for call in calls], values.table


def main(seed, calls, graph_calls):
    rng = np.random.default_rng(seed)
    garbage = Garbage(rng)
    done, failed = collections.Counter(), collections.Counter()
    errors_of_right, internal_errors = set(), set()
    for call in range(RIGHT_CALLS):
        for name, operator, inputs, attributes in right_calls(rng, call)[0]:
            try:
                touch(run_eagerly(operator, inputs, attributes))
            except Exception as e:
                errors_of_right.add(f"{name}: {e}"[:300])
    for call in range(calls + graph_calls):
        run = run_eagerly if call < calls else run_in_graph
        right, table = right_calls(rng, call)
        for name, operator, *arguments in right:
            # Whether an operator ever succeeds does not depend on what other operators there are.
            garbage.rng = np.random.default_rng([seed, call, zlib.crc32(name.encode())])
            inputs, attributes = spoil(garbage, *arguments)
            print(f"{name} {call}", file=sys.stderr)  # the last line names the call that crashed
            done[name] += 1
            try:
                touch(run(operator, inputs, attributes))
            except Exception as e:
                failed[name] += 1
                if isinstance(e, tf.errors.InternalError):
                    internal_errors.add(f"{name}: {e}"[:300])
        touch(ops.dynemb_stats(table))
    for name in done:
        print(json.dumps({"op": name, "calls": done[name], "failed": failed[name]}))
    print(json.dumps({"right": sorted(errors_of_right), "internal": sorted(internal_errors)}))


if __name__ == "__main__":
    main(*[int(a) for a in sys.argv[1:]])
