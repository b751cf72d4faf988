"""Keras callbacks for training on several ranks.

May import: `_warn`, `communicator`, `parallel`, `variables`.
"""

from tf_dynemb.callbacks.synchronize_ranks import SynchronizeRanks

__all__ = ["SynchronizeRanks"]
