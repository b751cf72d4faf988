"""Where rows are: devices, and the ranks that hold and exchange them, agree and share files.

May import: `_ops`, `communicator`, `ids`.
"""
