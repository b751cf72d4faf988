"""What snapshots have of a model besides its tables: dense weights, random seeds, the optimizer.

May import: `_warn`, `format`, `optimizers`, `parallel`, `storage`, `tables`, `variables`.
"""
