"""The places of rows: devices, and the ranks that own rows; exchange, agreement, shared files.

May import: `_ops`, `communicator`, `ids`.
"""
