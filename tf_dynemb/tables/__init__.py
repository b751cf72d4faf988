"""Hash tables in memory: options, initializers, the `Table`, and all its rows at one moment.

May import: `_ops`, `_warn`, `communicator`, `ids`, `parallel`.
"""
