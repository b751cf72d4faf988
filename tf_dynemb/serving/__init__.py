"""Looks up vectors in dumps, and follows the deltas that training publishes, without TensorFlow.

    from tf_dynemb.serving import Reader

    reader = Reader("/models/ctr/embeddings")
    vectors = reader.lookup([7, 2**40], table="user")  # float32 [2, dimension]
    reader.follow()  # from time to time, in any thread

May import: `_html`, `_presence`, `format`, `storage`.
"""

from tf_dynemb.serving.reader import Reader

__all__ = ["Reader"]
