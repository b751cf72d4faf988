"""Tables and `tf.distribute`: an error where a strategy has several replicas."""

from __future__ import annotations

import tensorflow as tf


def check_one_replica(action: str) -> None:
    """Raises a RuntimeError if the current `tf.distribute` strategy has several replicas.

    A table is not mirrored: each replica of one process would train its own copy, and each process
    would have its own table.

    Args:
        action: the call, for the message.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    has_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if replicas > 1 or has_servers:
        count = "" if has_servers else f" with {replicas} replicas"
        raise RuntimeError(
            f"{action} does not work under {type(strategy).__name__}{count}: tf.distribute does "
            "not know tables, and would train copies of them. To train on several devices or "
            "machines, start a process for each, by `tf-dynemb run` or another launcher; tables "
            "are then spread over them (docs/scaling.md)."
        )
