"""Snapshots of tables that all ranks write and read together: columns, files, watermarks.

May import: `_ops`, `_presence`, `communicator`, `parallel`, `storage`, `tables`.
"""
