"""Snapshots of tables that all ranks write and read together: columns, files, watermarks.

May import: `_ops`, `communicator`, `parallel`, `storage`, `tables`.
"""
