"""SavedModels with tables: `export_saved_model`, the saver of their rows, and `load_saved_model`.

May import: `_ops`, `_presence`, `_warn`, `chains`, `communicator`, `dense`, `format`, `parallel`,
`persistence`, `storage`, `variables`.
"""
