"""DynamicEmbeddingOptimizer: TFRA's name for OptimizerWrapper."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.optimizers.parts import Parts
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.tfra.restrict import RestrictPolicy
from tf_dynemb.variables.unwrap import unwrap


@keras.saving.register_keras_serializable(package="tf_dynemb")
class DynamicEmbeddingOptimizer(OptimizerWrapper):
    """An `OptimizerWrapper` that also keeps the `restrict_policy` of variables up to date.

    Args:
        keras_optimizer: the optimizer to wrap, of Keras 3.
        bp_v2: unused: steps add to rows, also on several ranks.
        synchronous: unused: on several ranks, the gradients of dense variables are always reduced.
        **kwargs: further arguments of `OptimizerWrapper`. Over ranks, gradients are added up by
            default, as in TFRA; gradient_reduction="mean" is the default of `OptimizerWrapper`.
    """

    def __init__(
        self,
        keras_optimizer: keras.optimizers.Optimizer,
        bp_v2: bool = False,
        synchronous: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(keras_optimizer, **{"gradient_reduction": "sum", **kwargs})

    @_ops.not_converted
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Steps, and then reports the stepped rows to the policies of the variables."""
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        super().apply(grads, trainable_variables)
        if isinstance(self._stepper, Parts):
            # The wrapper of each of the MultiOptimizer's optimizers has reported them.
            return
        stepped: dict[RestrictPolicy, list[tf.Tensor]] = {}
        variables = trainable_variables or self._stepper.variables
        for grad, variable in zip(grads, variables, strict=True):
            policy = getattr(unwrap(variable), "restrict_policy", None)
            if policy is not None and grad is not None:
                stepped.setdefault(policy, []).append(grad.indices)
        for policy, keys in stepped.items():
            policy.after_step(tf.concat(keys, 0))
