"""Hash tables in memory: options, initializers, `Table`, cuts, flushes, all rows at one moment.

May import: `_html`, `_ops`, `_presence`, `_warn`, `chains`, `communicator`, `format`, `ids`,
`parallel`, `storage`.
"""
