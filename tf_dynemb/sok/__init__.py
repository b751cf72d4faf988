"""NVIDIA SOK: the functions that its scripts call beside ours, and the dumps that it wrote.

May import: `_ops`, `_warn`, `communicator`, `ids`, `optimizers`, `parallel`, `persistence`,
`tables`, `variables`.
"""
