"""The places of rows: devices, and the ranks that own rows; exchange, agreement.

May import: `_gpu`, `_ops`, `_presence`, `_warn`, `communicator`, `ids`.
"""
