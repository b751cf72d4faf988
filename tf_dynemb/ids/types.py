"""Names for the types of arguments that may be of several kinds."""

from __future__ import annotations

from typing import TypeAlias

import numpy.typing as npt
import tensorflow as tf

# The ids of bags.
Ids: TypeAlias = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
# A tensor, or what `tf.convert_to_tensor` makes one of.
TensorLike: TypeAlias = "tf.Tensor | npt.ArrayLike"
