"""SavedModels with tables: `export_saved_model`, and the saver of their rows.

May import: `_ops`, `_presence`, `_warn`, `chains`, `communicator`, `dense`, `format`, `parallel`,
`persistence`, `storage`, `variables`.
"""
