"""Dumps and deltas of tables and their optimizer: write, load, apply, and what continues what.

May import: `_ops`, `_warn`, `communicator`, `optimizers`, `parallel`, `snapshots`, `storage`,
`tables`, `variables`.
"""
