"""Dumps and deltas of tables and their optimizer: writing, loading, applying and continuing them.

May import: `_ops`, `_presence`, `_warn`, `chains`, `communicator`, `optimizers`, `parallel`,
`snapshots`, `storage`, `tables`, `variables`.
"""
