"""The cases of `benchmarks.sparse` on PyTorch's tables: in a venv with torch and fbgemm-gpu-cpu.

- EmbeddingBag: `torch.nn.EmbeddingBag` for each table, sparse gradients, `torch.optim.Adagrad` or
  `SparseAdam`.
- FBGEMM: all tables in one operator that also steps the rows, which TorchRec uses. On a CPU, its
  Adagrad has one accumulator for each row, and it has no Adam.

Neither is a hash table: ids are row numbers, and the tables have all rows. For a comparison, run
`benchmarks.sparse` on the same machine at the same time of day.

    build/torch/bin/python -m benchmarks.torch_peers --optimizer adagrad --json torch.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Result, finish, parser_for, rates
from benchmarks.workload import Draws, Rows

BAGS, FBGEMM = "EmbeddingBag", "FBGEMM"
ZIPF, DISTINCT_STEPS, LEARNING_RATE = 1.05, 4, 0.01  # as in benchmarks.sparse
Step = Callable[[Any], Any]


class EmbeddingBags:
    """A module for each table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(options.rows, options.dim, mode="sum", sparse=True)
            for _ in range(options.tables)
        )
        kinds = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        kind = kinds.get(options.optimizer)
        self._optimizer = kind and kind(list(self.bags.parameters()), lr=LEARNING_RATE)

    def batch(self, numbers: list[Rows], hotness: int) -> list[Any]:
        """Returns the ids of each table, [samples, hotness]."""
        return [torch.from_numpy(part.reshape(-1, hotness)) for part in numbers]

    def forward(self, ids: list[Any]) -> Any:
        """Pools, without gradients."""
        with torch.no_grad():
            return [bag(part) for bag, part in zip(self.bags, ids, strict=True)]

    def train(self, ids: list[Any]) -> None:
        """Makes a step whose loss is the sum of all pooled vectors."""
        loss = sum(bag(part).sum() for bag, part in zip(self.bags, ids, strict=True))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class Fbgemm:
    """All tables in one operator."""

    def __init__(self, options: argparse.Namespace) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        shape = (options.rows, options.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [shape] * options.tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
        )
        self.tables.init_embedding_weights_uniform(-0.05, 0.05)

    def batch(self, numbers: list[Rows], hotness: int) -> tuple[Any, Any]:
        """Returns the ids of all tables and where each bag begins."""
        ids = torch.from_numpy(np.concatenate(numbers))
        return ids, torch.arange(0, len(ids) + 1, hotness)

    def forward(self, batch: tuple[Any, Any]) -> Any:
        """Pools, without gradients."""
        with torch.no_grad():
            return self.tables(*batch)

    def train(self, batch: tuple[Any, Any]) -> None:
        """Makes a step whose loss is the sum of all pooled vectors."""
        self.tables(*batch).sum().backward()


CONTENDERS = {BAGS: EmbeddingBags, FBGEMM: Fbgemm}


def run_steps(step: Step, batches: list[Any], count: int) -> None:
    """Runs `count` steps."""
    for number in range(count):
        step(batches[number % len(batches)])


def cases(options: argparse.Namespace, peers: dict[str, Any]) -> Iterator[Result]:
    """Measures ids that are drawn uniformly and by Zipf's law."""
    trains = options.optimizer != "none"
    what = f"train {options.optimizer}" if trains else "forward"
    for exponent, hotness in ((e, h) for e in (None, ZIPF) for h in options.hotness):
        draws = Draws(options.rows, exponent, seed=4)
        count = options.samples * hotness
        numbers = [
            [draws.take(count) for _ in range(options.tables)] for _ in range(DISTINCT_STEPS)
        ]
        steps = max(2, options.steps // hotness)
        actions = {}
        for name, peer in peers.items():
            batches = [peer.batch(part, hotness) for part in numbers]
            actions[name] = partial(
                run_steps, peer.train if trains else peer.forward, batches, steps
            )
        label = "uniform" if exponent is None else f"zipf {exponent}"
        yield Result(
            f"sparse {what}, {label}, hotness {hotness}",
            "steps/s",
            rates(actions, steps, options.repeats),
        )


def main() -> None:
    """Runs the cases for one optimizer, or none, and prints them."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    add("--optimizer", choices=("none", "adagrad", "adam"), default="none")
    add("--tables", type=int, default=26, help="tables per step")
    add("--rows", type=int, default=1_000_000, help="rows per table")
    add("--dim", type=int, default=16, help="floats per vector")
    add("--samples", type=int, default=8_192, help="samples per step")
    add("--hotness", type=int, nargs="+", default=[1, 10], help="ids per sample and table")
    add("--steps", type=int, default=20, help="steps per repeat; divided by the hotness")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = [n for n in options.contenders if n == BAGS or options.optimizer != "adam"]
    finish(list(cases(options, {n: CONTENDERS[n](options) for n in names})), options.json)


if __name__ == "__main__":
    main()
