"""Answers requests to exported models, in a separate process.

    python saved_model_client.py import|LIBRARY JOBS

JOBS is a pickle of a list of (path of a model, endpoint, arguments); the answers are written to
JOBS.answers as a pickle. `import` imports tf_dynemb; otherwise LIBRARY, the path of the operators,
is the only part of the package that the process loads. Arguments are arrays, `Ragged` and `Sparse`
in any nesting of lists and dicts.
"""

import pathlib
import pickle
import sys
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Ragged(NamedTuple):
    values: Any
    splits: Any


class Sparse(NamedTuple):
    indices: Any
    values: Any
    shape: Any


def pack(value):
    """Converts tensors to what can be pickled."""
    if isinstance(value, tf.RaggedTensor):
        return Ragged(pack(value.values), value.row_splits.numpy())
    if isinstance(value, tf.SparseTensor):
        return Sparse(*(part.numpy() for part in (value.indices, value.values, value.dense_shape)))
    if isinstance(value, dict):
        return {name: pack(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [pack(item) for item in value]
    return np.asarray(value)


def unpack(value):
    """The inverse of `pack`."""
    if isinstance(value, Ragged):
        return tf.RaggedTensor.from_row_splits(unpack(value.values), value.splits)
    if isinstance(value, Sparse):
        return tf.SparseTensor(*value)
    if isinstance(value, dict):
        return {name: unpack(item) for name, item in value.items()}
    if isinstance(value, list):
        return [unpack(item) for item in value]
    return tf.constant(value)


def answers(jobs):
    results = []
    for path, endpoint, arguments in jobs:
        loaded = tf.saved_model.load(path)
        if hasattr(loaded, endpoint):
            answer = getattr(loaded, endpoint)(*unpack(arguments))
        else:
            answer = loaded.signatures[endpoint](**unpack(arguments[0]))
        results.append(pack(answer))
    return results


def main(how, file):
    if how == "import":
        import tf_dynemb  # noqa: F401
    else:
        tf.load_op_library(how)
    jobs = pickle.loads(pathlib.Path(file).read_bytes())
    pathlib.Path(f"{file}.answers").write_bytes(pickle.dumps(answers(jobs)))
    if how != "import":
        assert not [name for name in sys.modules if name.startswith("tf_dynemb")]


if __name__ == "__main__":
    import saved_model_client  # the module of the classes in pickles

    saved_model_client.main(*sys.argv[1:])
