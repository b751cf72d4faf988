"""Trains DLRM on Criteo's click logs, or on synthetic clicks, on one or several ranks.

    python examples/dlrm.py                                  # small, synthetic clicks, one process
    tf-dynemb run -np 2 examples/dlrm.py --phases            # two ranks, and where the time goes
    horovodrun -np 8 python examples/dlrm.py --preset mlperf --data /data/criteo --layout mlperf

The 26 tables are dynamic: neither the number of ids nor their range needs to be known. criteo.py
describes the layouts of the data, dlrm_model.py the model, and step_phases.py the phases of
a step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import criteo
import keras
import numpy as np
import step_phases
import tensorflow as tf
from criteo import Batches, Clicks, Samples
from dlrm_model import Dlrm, Sizes, WarmUpThenDecay
from scoring import score_of_all
from synthetic_clicks import SyntheticClicks

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.communicator import Communicator

PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "dim": 16,
        "bottom": [64],
        "top": [128, 64],
        "rows_at_most": 100_000,
        "batch_size": 2048,
        "learning_rate": None,
    },
    # MLPerf's sizes since DLRM-DCNv2, but with DLRM's dot products in place of the cross network.
    "mlperf": {
        "dim": 128,
        "bottom": [512, 256],
        "top": [1024, 1024, 512, 256],
        "rows_at_most": 40_000_000,
        "batch_size": 65_536,
        "learning_rate": 0.005,
    },
}
LEARNING_RATES = {"adagrad": 0.01, "sgd": 0.1, "adam": 0.001}
TRACED_STEPS = 10
WARM_UP = 3  # steps that trace functions and fill caches; not counted in the rates


def optimizer_of(options: argparse.Namespace) -> keras.optimizers.Optimizer:
    """Creates the Keras optimizer that the options name."""
    peak = options.learning_rate
    if peak is None:
        peak = LEARNING_RATES[options.optimizer]
    rate: Any = peak
    if options.warm_up_steps or options.decay_steps:
        rate = WarmUpThenDecay(
            peak, options.warm_up_steps, options.decay_start, options.decay_steps
        )
    if options.optimizer == "adagrad":  # starts at 0, as in MLPerf
        return keras.optimizers.Adagrad(rate, initial_accumulator_value=0.0, epsilon=1e-8)
    if options.optimizer == "sgd":
        return keras.optimizers.SGD(rate)
    return keras.optimizers.Adam(rate)


def open_data(options: argparse.Namespace, rows: tuple[int, ...]) -> tuple[Clicks, Clicks]:
    """Opens the training and the test samples."""
    if options.data is not None:
        return criteo.open_clicks(options.data, options.layout, tuple(options.hotness))
    shape = (tuple(options.hotness), rows, options.zipf, options.seed)
    train = SyntheticClicks(options.samples, *shape)
    return train, SyntheticClicks(options.test_samples, *shape, first=options.samples)


def build(
    clicks: Clicks, rows: tuple[int, ...], options: argparse.Namespace, comm: Communicator
) -> Dlrm:
    """Builds the model for these clicks."""
    features = len(clicks.hotness)
    dims = options.dims or [options.dim]
    if len(dims) not in (1, features):
        raise ValueError(f"--dims needs 1 or {features} widths, got {len(dims)}")
    sizes = Sizes(
        hotness=clicks.hotness,
        dim=options.dim,
        dims=tuple(dims * (features // len(dims))),
        bottom=tuple(options.bottom),
        top=tuple(options.top),
    )
    spread = [count**-0.5 for count in rows]
    keras.utils.set_random_seed(options.seed + comm.rank)
    return Dlrm(
        sizes,
        optimizer_of(options),
        spread,
        options.seed,
        key_type=options.key_type,
        exchange_dtype=options.exchange_dtype,
    )


def train_epoch(
    model: Dlrm, batches: Iterable[Samples], options: argparse.Namespace, comm: Communicator
) -> tuple[float, list[float]]:
    """Trains on the batches once; rank 0 prints the progress.

    Returns:
        The mean loss of all ranks, and the seconds per step between two lines of output.
    """
    losses: list[tf.Tensor] = []
    seconds: list[float] = []
    began, at = time.perf_counter(), 0
    for number, samples in enumerate(batches, start=1):
        losses.append(model.step(*samples))
        if number == WARM_UP:
            losses[-1].numpy()
            began, at = time.perf_counter(), number
        elif number % options.log_every == 0 and number > WARM_UP:
            mean = mean_over_ranks(losses[-options.log_every :], comm)
            took = time.perf_counter() - began
            seconds.append(took / (number - at))
            if comm.rank == 0:
                rate = options.batch_size * (number - at) / took
                print(f"step {number:6}: loss {mean:.4f}, {rate:10,.0f} samples/s", flush=True)
            began, at = time.perf_counter(), number
    return mean_over_ranks(losses, comm), seconds


def mean_over_ranks(losses: list[tf.Tensor], comm: Communicator) -> float:
    """Averages losses over the ranks, whose parts have the same size."""
    rank_mean = float(np.mean([loss.numpy() for loss in losses]))
    return statistics.mean(comm.gather_objects(rank_mean, "dlrm/loss"))


def test(model: Dlrm, batches: Batches, comm: Communicator) -> dict[str, float] | None:
    """Scores the samples of all ranks exactly; rank 0 returns the scores."""
    parts = [(samples.labels.numpy(), model.predict(samples)) for samples in batches]
    labels, chances = (np.concatenate(part) for part in zip(*parts, strict=True))
    return score_of_all(comm, labels, chances)


def best_scores(clicks: SyntheticClicks, samples: int) -> dict[str, float]:
    """Scores the planted model, which no other model can beat except by chance."""
    from scoring import score

    return score(clicks.read(0, samples).labels, clicks.chances(0, samples))


def measure_phases(model: Dlrm, batches: Iterable[Samples], comm: Communicator) -> None:
    """Prints, on rank 0, where the time of a step goes, averaged over the ranks."""
    samples = step_phases.awaited(batches)

    def step() -> None:
        model.step(*next(samples)).numpy()

    for _ in range(WARM_UP):
        step()
    comm.barrier("dlrm")
    began = time.perf_counter()
    for _ in range(TRACED_STEPS):
        step()
    untraced = (time.perf_counter() - began) / TRACED_STEPS * 1e3
    step_shares = step_phases.mean_over_ranks(step_phases.trace(step, TRACED_STEPS), comm)
    if comm.rank == 0:
        print("\n" + "\n".join(step_phases.table(step_shares, untraced)))
        print(step_phases.__doc__.partition("Each phase therefore has two figures:")[2].strip())


def write_profile(
    model: Dlrm, batches: Iterable[Samples], folder: Path, comm: Communicator
) -> None:
    """Writes a trace of some steps of rank 0 for TensorBoard; all ranks run the steps."""
    profiler = tf.profiler.experimental
    if comm.rank == 0:
        profiler.start(str(folder))
    for number, samples in zip(range(TRACED_STEPS), step_phases.awaited(batches), strict=False):
        with profiler.Trace("train", step_num=number, _r=1):
            model.step(*samples).numpy()
    if comm.rank == 0:
        profiler.stop()
        print(f"\ntrace of {TRACED_STEPS} steps: tensorboard --logdir {folder}")


def run(options: argparse.Namespace) -> dict[str, float] | None:
    """Trains, tests and measures; rank 0 returns the figures that it printed."""
    for device in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(device, True)  # leaves room for the tables
    de.init()  # joins the ranks that a launcher has started, and gives each a GPU
    comm = communicator.get()
    if options.batch_size % comm.size:
        raise ValueError(f"--batch-size {options.batch_size} is no multiple of {comm.size} ranks")

    rows = tuple(min(count, options.rows_at_most) for count in criteo.ROWS)
    train_clicks, test_clicks = open_data(options, rows)
    model = build(train_clicks, rows, options, comm)
    train = Batches(train_clicks, options.batch_size, comm, whole=True, most=options.steps)
    if not len(train):
        raise ValueError(f"{len(train_clicks)} samples do not fill a batch")
    evaluation = Batches(
        test_clicks, options.test_batch_size, comm, whole=False, most=options.test_steps
    )
    batches: Iterable[Samples] = train
    if options.data is None:
        began = time.perf_counter()
        batches = list(train)  # generates the samples outside the timed steps
        if comm.rank == 0:
            print(f"generated {train.samples:,} samples in {time.perf_counter() - began:.1f} s")
    if comm.rank == 0:
        weights = sum(int(np.prod(v.shape)) for v in model.dense.trainable_variables)
        print(
            f"{len(model.tables)} tables, {sum(train_clicks.hotness)} ids a sample, {weights:,} "
            f"dense weights; {comm.size} rank{'s' * (comm.size > 1)}, {options.optimizer}, "
            f"{options.batch_size} samples a step"
        )

    ahead = model.look_ahead if options.look_ahead else iter
    step_seconds: list[float] = []
    measured: dict[str, float] | None = None
    for epoch in range(1, options.epochs + 1):
        loss, seconds = train_epoch(model, ahead(batches), options, comm)
        step_seconds += seconds
        measured = test(model, evaluation, comm)
        if measured is not None:
            measured["loss"] = loss
            print(
                f"epoch {epoch}: loss {loss:.4f}; {evaluation.samples:,} test samples of all ranks:"
                f" AUC {measured['auc']:.4f}, logloss {measured['logloss']:.4f}",
                flush=True,
            )
    held = comm.gather_objects([len(table) for table in model.tables], "dlrm/rows")
    if measured is not None:
        if isinstance(test_clicks, SyntheticClicks):
            best = best_scores(test_clicks, evaluation.samples)
            print(f"planted model's own: AUC {best['auc']:.4f}, logloss {best['logloss']:.4f}")
        rows_held = ", ".join(f"{sum(rank_rows):,}" for rank_rows in held)
        print(f"rows in the tables of each rank: {rows_held}")
        if step_seconds:
            measured["samples_per_second"] = options.batch_size / statistics.median(step_seconds)
            print(f"median: {measured['samples_per_second']:,.0f} samples/s")

    if options.phases:
        measure_phases(model, ahead(itertools.cycle(batches)), comm)
    if options.profile is not None:
        write_profile(model, ahead(itertools.cycle(batches)), options.profile, comm)
    if options.dump is not None:
        de.dump(options.dump, model.tables, optimizer=model.optimizer)
        if comm.rank == 0:
            print(f"tables of all ranks: {options.dump}")
    return measured


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line; the preset sets the defaults of the other options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="default sizes of model and batch")
    add("--data", type=Path, help="folder with Criteo's clicks; default: synthetic clicks")
    add("--layout", choices=criteo.LAYOUTS, default="mlperf", help="layout of --data (mlperf)")
    add("--hotness", type=int, nargs="+", help="ids per sample of each feature (MLPerf's)")
    add("--rows-at-most", type=int, help="maximum number of distinct ids of a feature")
    add("--samples", type=int, default=131_072, help="synthetic training samples (default: 131072)")
    add("--test-samples", type=int, default=32_768, help="synthetic test samples (default: 32768)")
    add("--zipf", type=float, default=1.1, help="power law of synthetic ids; 0: uniform (1.1)")
    add("--seed", type=int, default=0, help="seed of clicks and initial weights (0)")

    add("--dim", type=int, help="width of the vectors that are multiplied")
    add("--dims", type=int, nargs="+", help="width of the vectors of each table (default: --dim)")
    add("--bottom", type=int, nargs="*", help="widths of the bottom MLP, before --dim")
    add("--top", type=int, nargs="*", help="widths of the top MLP, before its one output")
    add("--key-type", choices=("int64", "int32"), default="int64", help="of the tables (int64)")
    add(
        "--exchange-dtype",
        choices=("float16", "bfloat16", "int8"),
        help="type of vectors and gradients in messages between ranks (default: their own)",
    )

    add("--optimizer", choices=LEARNING_RATES, default="adagrad", help="Keras optimizer (adagrad)")
    add(
        "--learning-rate",
        type=float,
        help="default: 0.005 with --preset mlperf, otherwise depends on the optimizer",
    )
    add("--warm-up-steps", type=int, default=0, help="steps in which the learning rate rises (0)")
    add("--decay-start", type=int, default=0, help="step at which it begins to fall (0)")
    add("--decay-steps", type=int, default=0, help="steps in which it falls to 0; 0: none (0)")
    add("--batch-size", type=int, help="samples per step, over all ranks")
    add("--test-batch-size", type=int, default=16_384, help="the same in the test (16384)")
    add("--epochs", type=int, default=1, help="passes over the training samples (1)")
    add("--steps", type=int, help="maximum number of steps per epoch")
    add("--test-steps", type=int, help="maximum number of test batches")
    add("--log-every", type=int, default=10, help="steps between two lines of output (10)")

    add("--look-ahead", action="store_true", help="look up the next ids while a step runs")
    add("--phases", action="store_true", help="print a breakdown of the time of a step at the end")
    add("--profile", type=Path, help="folder for a TensorBoard trace of some steps")
    add("--dump", type=Path, help="folder to dump the tables to at the end, shared by all ranks")
    options = parser.parse_args(arguments)
    options.hotness = options.hotness or criteo.HOTNESS
    if len(options.hotness) != len(criteo.HOTNESS):
        parser.error(f"--hotness needs {len(criteo.HOTNESS)} numbers, got {len(options.hotness)}")
    for name, value in PRESETS[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    run(parse_options())
