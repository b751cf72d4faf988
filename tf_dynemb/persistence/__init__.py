"""Dumps and deltas of tables and their optimizer: written, loaded, applied, and continued.

May import: `_ops`, `_warn`, `communicator`, `optimizers`, `parallel`, `snapshots`, `storage`,
`tables`, `variables`.
"""
