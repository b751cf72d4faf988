"""Keras callbacks: training on several ranks, numbers about tables, metrics, publication.

May import: `_presence`, `_warn`, `communicator`, `parallel`, `persistence`, `storage`, `variables`.
"""

from tf_dynemb.callbacks.metrics import Metrics
from tf_dynemb.callbacks.publish import Publication, Publish
from tf_dynemb.callbacks.synchronize_ranks import SynchronizeRanks
from tf_dynemb.callbacks.table_stats import TableStats

__all__ = ["Metrics", "Publication", "Publish", "SynchronizeRanks", "TableStats"]
