"""NVIDIA SOK: additional functions that its scripts call, and a reader of its dumps.

May import: `_ops`, `_presence`, `_warn`, `communicator`, `ids`, `optimizers`, `parallel`,
`persistence`, `tables`, `variables`.
"""
