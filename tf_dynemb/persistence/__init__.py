"""Dumps and deltas of tables and their optimizer: writing, loading, applying and continuing them.

All ranks write and read a snapshot together.

May import: `_html`, `_ops`, `_presence`, `_warn`, `chains`, `communicator`, `dense`, `format`,
`optimizers`, `parallel`, `storage`, `tables`, `variables`.
"""
