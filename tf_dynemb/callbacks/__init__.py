"""Keras callbacks: training on several ranks, numbers about tables.

May import: `_warn`, `communicator`, `parallel`, `variables`.
"""

from tf_dynemb.callbacks.synchronize_ranks import SynchronizeRanks
from tf_dynemb.callbacks.table_stats import TableStats

__all__ = ["SynchronizeRanks", "TableStats"]
