"""Keras callbacks: training on several ranks, numbers about tables, publication.

May import: `_presence`, `_warn`, `communicator`, `parallel`, `persistence`, `storage`, `variables`.
"""

from tf_dynemb.callbacks.publish import Publication, Publish
from tf_dynemb.callbacks.synchronize_ranks import SynchronizeRanks
from tf_dynemb.callbacks.table_stats import TableStats

__all__ = ["Publication", "Publish", "SynchronizeRanks", "TableStats"]
