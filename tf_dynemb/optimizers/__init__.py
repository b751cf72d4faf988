"""Optimizers that step tables: the wrapper, in-row kernels, Keras's own code, and gradients.

May import: `_ops`, `_warn`, `communicator`, `ids`, `parallel`, `tables`, `variables`.
"""
