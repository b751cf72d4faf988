"""Keras layers whose embedding tables are hash tables.

May import: `_aliases`, `_warn`, `communicator`, `ids`, `lookup`, `optimizers`, `tables`,
`variables`.
"""

from tf_dynemb.layers.embedding import Embedding
from tf_dynemb.layers.embedding_bag import EmbeddingBag
from tf_dynemb.layers.multi_table_embedding import MultiTableEmbedding

__all__ = ["Embedding", "EmbeddingBag", "MultiTableEmbedding"]
