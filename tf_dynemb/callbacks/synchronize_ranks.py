"""Keras callbacks for training on several ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras

from tf_dynemb import communicator
from tf_dynemb._warn import warn
from tf_dynemb.callbacks.first_step import before_first_step
from tf_dynemb.callbacks.rank_metrics import average_untrained, reduce_metrics, replace_logs
from tf_dynemb.parallel.agreement import Ranks
from tf_dynemb.variables.replicas import broadcast_variables
from tf_dynemb.variables.unwrap import filter_variables


class SynchronizeRanks(keras.callbacks.Callback):  # type: ignore[misc]
    """Joins the `model.fit` or `model.evaluate` calls of all ranks into one run.

    Every rank calls them with its own share of the data, this callback, and otherwise the same
    arguments. The callback

    - gives the dense weights, and in `fit` the optimizer's variables, the values of rank 0 before
      the first step. Tables need no copying, because each row is on one rank only;
    - reduces metrics over the ranks. States of Keras metrics are reduced as `tf.distribute` would,
      by the `aggregation` of their variables: usually they are added up, so that an accuracy or an
      AUC is computed over all samples. Other logs are replaced with their mean over the ranks;
    - averages the statistics of dense layers, such as the moving averages of BatchNormalization, at
      the end of an epoch's training;
    - ends the training on all ranks after an epoch in which one of them has requested it;
    - lets only rank 0 show the progress bar and other output that depends on `verbose`.

    It must be the first of the callbacks. The callbacks after it, and the history, then see the
    metrics of all ranks in `logs` at the end of an epoch and of an evaluation, so that
    EarlyStopping makes the same decision on all ranks. Logs of single batches are the rank's own:
    do not use them to end an epoch early. A callback that writes files, such as ModelCheckpoint,
    needs a separate path on each rank.

    All ranks must run the same number of steps, in the validation too, because every step waits for
    all of them. If Keras knows the number beforehand, the ranks compare it. If it does not,
    `model.evaluate` returns the rank's own metrics. Each rank keeps its own random seeds (dropout).
    In one process the callback does nothing.

    Example:
    >>> import tensorflow as tf
    >>> import tf_dynemb as de
    >>> model = keras.Sequential([de.layers.Embedding(4), keras.layers.Dense(1)])
    >>> model.compile(de.OptimizerWrapper(keras.optimizers.Adam()), loss="mse")
    >>> my_ids, my_labels = tf.constant([[3], [5]]), tf.constant([[0.0], [1.0]])
    >>> _ = model.fit(my_ids, my_labels, callbacks=[SynchronizeRanks()], verbose=0)

    Raises:
        ValueError: in `fit`, `evaluate` or `predict`: the ranks have different numbers of steps or
            epochs, or different models, or logs of different names.
    """

    def __init__(self) -> None:
        super().__init__()
        self._start(in_fit=False)

    def _start(self, in_fit: bool) -> None:
        self._in_fit = in_fit
        # The metrics of the epoch's training and of its validation; None until they are known.
        self._trained: dict[str, Any] | None = None
        self._validated: dict[str, Any] = {}
        # The steps of an evaluation whose metrics are not yet reduced; None: not known.
        self._test_steps: int | None = None
        self._warned = False

    def set_params(self, params: dict[str, Any]) -> None:
        """Stores the parameters, and disables the output of all ranks except the first."""
        super().set_params(params)
        self._start(in_fit=False)
        if params and communicator.get().rank != 0:
            params["verbose"] = 0  # in the dict that the progress bar gets after this callback

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compares the parameters of the ranks, and makes the dense variables equal."""
        self._start(in_fit=True)
        if not _several():
            return
        self._compare("fit", ("steps", "epochs"))
        if self.model.built:
            self._broadcast()
        else:
            before_first_step(self.model, self._broadcast)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the last epoch's metrics."""
        self._trained, self._validated = None, {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the epoch's training before a validation; other evaluations start as `fit` does."""
        if not _several():
            return
        if self._in_fit:
            self._end_training_of_epoch()
            return
        self._compare("evaluate", ("steps",))
        if self.model.built:
            broadcast_variables(self.model.weights)
        self._test_steps = self.params.get("steps")

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """After the last batch of an evaluation, reduces its metrics over the ranks."""
        # Keras computes the result of `model.evaluate` before `on_test_end`.
        if self._test_steps is not None and batch + 1 >= self._test_steps:
            self._validated = reduce_metrics(self.model)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Replaces the logs of an evaluation, in place, with the logs of all ranks."""
        if not _several():
            return
        values = self._validated if self._test_steps is not None else reduce_metrics(self.model)
        logs = {} if logs is None else logs
        replace_logs(logs, values if values.keys() <= logs.keys() else {})
        self._validated = {f"val_{name}": value for name, value in logs.items()}

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compares the numbers of steps of the ranks."""
        if _several():
            self._compare("predict", ("steps",))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the logs of an epoch, in place, with the logs of all ranks.

        If a rank has requested the end of the training, it ends on all ranks.
        """
        if not _several():
            return
        self._end_training_of_epoch()
        logs = {} if logs is None else logs
        trained = self._trained or {}
        # A model with its own logs can lack some or all of the metrics in them.
        known = trained if trained.keys() <= logs.keys() else {}
        replace_logs(logs, known | self._validated)
        comm = communicator.get()
        if any(comm.gather_objects(bool(self.model.stop_training), "dynemb/stop")):
            self.model.stop_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Marks the end of `fit`: later evaluations are not validations."""
        self._in_fit = False

    def _compare(self, method: str, names: Sequence[str]) -> None:
        ranks = Ranks(f"model.{method}")
        with ranks.stage() as stage:
            stage.say([[self.params.get(name) for name in names], bool(self.model.built)])
        for i, name in enumerate(names):
            values = [numbers[i] for numbers, _ in stage.said]
            if any(value != values[0] for value in values):
                each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(
                    f"model.{method} must have the same number of {name} on all ranks, got {each}."
                )
        if len({built for _, built in stage.said}) > 1:
            raise ValueError("The model is built on some ranks and not on others.")

    def _broadcast(self) -> None:
        # Not `model.variables`: ranks with the same random states would drop the same units.
        variables = list(self.model.weights)
        optimizer = self.model.optimizer
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            variables += optimizer.variables
        broadcast_variables(variables)

    def _end_training_of_epoch(self) -> None:
        if self._trained is not None:
            return
        self._trained = reduce_metrics(self.model)
        average_untrained(self.model)
        if not self._warned and not _weights_are_equal(self.model):
            self._warned = True
            warn(
                "The dense weights differ between ranks. Reduce gradients over the ranks, as "
                "tf_dynemb.OptimizerWrapper does."
            )


def _several() -> bool:
    return communicator.get().size > 1


def _weights_are_equal(model: keras.Model) -> bool:
    checksum = 0
    for variable in filter_variables(model.trainable_weights)[1]:
        checksum = zlib.crc32(variable.numpy().tobytes(), checksum)
    return len(set(communicator.get().gather_objects(checksum, "dynemb/weights"))) == 1
