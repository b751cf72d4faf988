"""The places of rows: devices, and the ranks that own rows; exchange, agreement, files of ranks.

May import: `_ops`, `_presence`, `_warn`, `communicator`, `ids`.
"""
