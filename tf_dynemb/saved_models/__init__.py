"""SavedModels with tables: `export_saved_model`, and the saver of their rows.

May import: `_ops`, `_presence`, `_warn`, `chains`, `communicator`, `dense`, `storage`, `parallel`,
`variables`, `persistence`.
"""
