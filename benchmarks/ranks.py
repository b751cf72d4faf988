"""The engines of several ranks, in the same processes, in turns: alltoalls, and a training step.

    mpiexec -n 2 python -m benchmarks.ranks [--engines gloo,mpi,horovod] [--rounds 8]

Each figure is the median over calls of the slowest rank's time. The alltoalls are calls of a
`tf.function`: 8 KB and 13.6 MB (the vectors of a batch of 8,192 samples, 26 tables of dim 16) from
each rank, in equal slices, and with half of the bytes for one rank. The training step is that of 26
tables of dim 16 with one zipf id per sample, Adagrad, and two dense layers; its losses are printed
beside those of one rank. Horovod is started without horovodrun, so that it shares the processes.
The engine "tls" is Gloo with TLS, by the files that TF_DYNEMB_RANKS_TLS_* name.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.communicator import Communicator
from tf_dynemb.ranks import tls
from tf_dynemb.ranks.engines import over_gloo, over_mpi
from tf_dynemb.ranks.libraries import find_mpi

TABLES, DIM, SAMPLES, ROWS = 26, 16, 8192, 100_000
WORDS = TABLES * SAMPLES * DIM
# The words that each rank sends, the alltoalls in a call, and the share of the words for one rank.
CASES = {
    "8 KB": (2048, 20, None),
    "13.6 MB": (WORDS, 1, None),
    "13.6 MB, half to one": (WORDS, 1, 0.5),
}
BATCHES = 4


def start_horovod(comm: Communicator) -> Communicator:
    """Initializes Horovod in ranks that another launcher has started, on one machine."""
    import horovod.tensorflow as horovod
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    port = 0
    if comm.rank == 0:
        start_horovod.server = RendezvousServer()  # type: ignore[attr-defined]  # keeps it alive
        port = start_horovod.server.start()  # type: ignore[attr-defined]
        hosts = get_host_assignments(parse_hosts(f"localhost:{comm.size}"), comm.size)
        start_horovod.server.init(hosts)  # type: ignore[attr-defined]
    port = comm.gather_objects(port, "horovod/port")[0]
    of_rank = dict.fromkeys(("RANK", "LOCAL_RANK"), comm.rank)
    of_all = dict.fromkeys(("SIZE", "LOCAL_SIZE"), comm.size) | {"CROSS_RANK": 0, "CROSS_SIZE": 1}
    gloo = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "lo"}
    engine = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "HOSTNAME": "localhost"}
    for name, value in (of_rank | of_all | gloo | engine).items():
        os.environ[f"HOROVOD_{name}"] = str(value)
    horovod.init()
    return communicator._Horovod(horovod)


def join(engines: list[str]) -> tuple[dict[str, Communicator], dict[str, float]]:
    """Returns the communicator of each engine, and the seconds that it took to join it."""
    library = find_mpi(os.environ)
    if library is None:
        raise RuntimeError("Start this with mpiexec: pip install mpich.")
    begin = time.monotonic()
    mpi: Communicator = over_mpi(library, 60)
    comms, seconds = {}, {}
    for engine in engines:
        if engine != "mpi":
            begin = time.monotonic()
        if engine == "mpi":
            comms[engine] = mpi
        elif engine in ("gloo", "tls"):
            encryption = tls.find(os.environ) if engine == "tls" else None
            comms[engine] = over_gloo(
                mpi.rank, mpi.size, "127.0.0.1", 29511, 60, None, "", encryption
            )
        else:
            comms[engine] = start_horovod(mpi)
        seconds[engine] = time.monotonic() - begin
    return comms, seconds


def exchange(
    comm: Communicator, words: int, repeat: int, skew: float | None
) -> Callable[[], object]:
    """Returns a call of `repeat` alltoalls of `words` floats."""
    rows = np.full(comm.size, words // comm.size)
    if skew is not None and comm.size > 1:
        rows[:] = int(words * (1 - skew)) // (comm.size - 1)
        rows[(comm.rank + 1) % comm.size] += words - rows.sum()
    rows[-1] += words - rows.sum()
    splits = tf.constant(rows, tf.int32)

    @tf.function(autograph=False)
    def alltoalls(data: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for i in range(repeat):
            with tf.control_dependencies([total]):
                received, _ = comm.alltoall(data, splits, f"benchmark/{words}/{skew}/{i}")
            total = received[0]
        return total

    data = tf.fill([words], 1.0)
    return lambda: alltoalls(data).numpy()


def trainer(comm: Communicator, batch: int) -> Callable[[int], float]:
    """Returns a function that trains on batch number i and returns the loss of all ranks."""
    random = np.random.default_rng(1)
    ids = np.minimum(random.zipf(1.2, (BATCHES, batch, TABLES)), ROWS)
    labels = (ids.sum(2) % 2).astype(np.float32)
    share = slice(comm.rank * batch // comm.size, (comm.rank + 1) * batch // comm.size)
    features = [[tf.constant(each[share, t, None]) for t in range(TABLES)] for each in ids]
    targets = [tf.constant(each[share]) for each in labels]
    keras.utils.set_random_seed(1)
    tables = [
        de.DynamicVariable(DIM, keras.initializers.RandomNormal(stddev=0.1, seed=t), name=f"t{t}")
        for t in range(TABLES)
    ]
    hidden = tf.Variable(tf.random.stateless_normal([TABLES * DIM, 32], [1, 2]) * 0.05)
    output = tf.Variable(tf.random.stateless_normal([32, 1], [3, 4]) * 0.2)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.05))

    @tf.function(autograph=False)
    def step(features: list[tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        bags = [tf.RaggedTensor.from_tensor(feature) for feature in features]
        with tf.GradientTape() as tape:
            vectors = tf.concat(de.lookup_sparse(tables, bags, combiners="sum"), 1)
            logits = tf.reshape(tf.nn.relu(vectors @ hidden) @ output, [-1])
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        variables = [*tables, hidden, output]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return comm.allreduce([loss], True, "benchmark/loss")[0]

    def train(i: int) -> float:
        communicator.use(comm)
        return float(step(features[i % BATCHES], targets[i % BATCHES]))

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", default="gloo,mpi,horovod")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    engines = options.engines.split(",")
    comms, seconds = join(engines)
    reference = comms[engines[0]]
    calls: dict[tuple[str, str], Callable[[int], Any]] = {}
    repeats: dict[str, int] = {}
    for case, (words, repeat, skew) in CASES.items():
        repeats[case] = repeat
        for engine, comm in comms.items():
            call = exchange(comm, words, repeat, skew)
            calls[case, engine] = lambda _, call=call: call()
    losses = {"one rank": [trainer(communicator.LOCAL, SAMPLES)]}
    losses = {"one rank": [losses["one rank"][0](i) for i in range(BATCHES)]}
    repeats["step"] = 1
    for engine, comm in comms.items():
        communicator.use(comm)
        calls["step", engine] = train = trainer(comm, SAMPLES)
        losses[engine] = [train(i) for i in range(BATCHES)]
    times: dict[str, list[float]] = {}
    for case in repeats:
        for turn in range(options.rounds + 1):  # the first is not counted
            for engine in engines:
                reference.barrier()
                for i in range(3):
                    begin = time.perf_counter()
                    calls[case, engine](i)
                    took = (time.perf_counter() - begin) * 1000 / repeats[case]
                    if turn:
                        times.setdefault(f"{case}|{engine}", []).append(took)
    everyone: list[dict[str, list[float]]] = reference.gather_objects(times, "benchmark/times")
    started = reference.gather_objects(seconds, "benchmark/started")
    if reference.rank == 0:
        print(f"{reference.size} ranks; milliseconds, medians of the slowest rank's calls")
        print(f"| | {' | '.join(engines)} |\n|---|{'---|' * len(engines)}")
        for case in repeats:
            slowest = {
                engine: [
                    max(v) for v in zip(*(t[f"{case}|{engine}"] for t in everyone), strict=True)
                ]
                for engine in engines
            }
            cells = [f"{statistics.median(slowest[engine]):.2f}" for engine in engines]
            print(f"| {case} | {' | '.join(cells)} |")
        cells = [f"{1000 * max(each[engine] for each in started):.0f}" for engine in engines]
        print(f"| to join | {' | '.join(cells)} |")
        for name, values in losses.items():
            print(f"losses, {name}: {' '.join(f'{value:.6f}' for value in values)}")
    reference.barrier()


if __name__ == "__main__":
    main()
