"""Embedding tables that are hash tables, for TensorFlow 2 and Keras 3.

    import tf_dynemb as de

    table = de.DynamicVariable(dimension=16)
    vectors = de.lookup_sparse(table, ids, combiners="mean")

See `de.layers` for Keras layers and `de.OptimizerWrapper` for training.
"""

from tf_dynemb import layers
from tf_dynemb._version import __version__
from tf_dynemb.communicator import init
from tf_dynemb.dynamic_variable import DynamicVariable
from tf_dynemb.exchange import assign, export
from tf_dynemb.lookup import lookup_sparse
from tf_dynemb.optimizer import OptimizerWrapper
from tf_dynemb.rowwise_adagrad import RowwiseAdagrad
from tf_dynemb.static_variable import Variable
from tf_dynemb.unwrap import filter_variables

__all__ = [
    "DynamicVariable",
    "OptimizerWrapper",
    "RowwiseAdagrad",
    "Variable",
    "__version__",
    "assign",
    "export",
    "filter_variables",
    "init",
    "layers",
    "lookup_sparse",
]
