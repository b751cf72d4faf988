"""Copies for serving by the format of their vectors: bytes, speed, and what quality they cost.

    python -m benchmarks.served_rows --ratings ratings.dat

1. Bytes of vectors beside float32, at dimensions 16 and 64.
2. Speed, at both: the publication of a copy, and lookups in an exported model of it, single
   ids and sums of bags of 8, of random keys of a table that is larger than the caches. The formats
   take turns.
3. AUC on the test set of the Adult data (the model of examples/quickstart.py), and with `--ratings`
   on MovieTweetings, for ratings of 8 and more in the last tenth of the ratings (the model of
   benchmarks/online.py, trained on the others). The trained tables load the rows of the copies.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import tf_dynemb as de
from benchmarks import online
from benchmarks.harness import describe_machine, interleave
from tf_dynemb.format.vector_format import FORMATS
from tf_dynemb.storage import Chain

NAMES = tuple(FORMATS)
CHUNK, BATCH, BAG = 1 << 18, 1 << 15, 8


def vector_bytes(path: Path) -> int:
    """Returns the bytes of the files of vectors of a chain."""
    files = (
        shard.files["vectors"].bytes
        for snapshot in Chain.open(path).snapshots
        for table in snapshot.manifest.tables
        for shard in table.shards
    )
    return sum(files)


def publish_all(folder: Path) -> dict[str, float]:
    """Publishes a copy of `folder/chain` for each format; returns the seconds that each took."""
    seconds = {}
    for name in NAMES:
        began = time.perf_counter()
        de.publish(folder / name, from_=folder / "chain", rows=name)
        seconds[name] = time.perf_counter() - began
    return seconds


class Lookups(tf.Module):
    """A table, with the calls whose speed is measured."""

    def __init__(self, table: de.DynamicVariable) -> None:
        super().__init__()
        self.table = table

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def lookup(self, ids: Any) -> Any:
        return self.table.lookup(ids, insert=False)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def pool(self, ids: Any) -> Any:
        bags = tf.reshape(ids, [-1, BAG])
        return de.lookup_sparse(self.table, bags, combiners="sum", insert=False)


def speed(rows: int, dim: int, repeats: int) -> None:
    """Prints the bytes and the speeds of copies of a table of random vectors."""
    table = de.DynamicVariable(dim, "zeros", "host", name=f"table_{dim}")
    rng = np.random.default_rng(0)
    for begin in range(0, rows, CHUNK):
        keys = np.arange(begin, min(begin + CHUNK, rows))
        table.upsert(keys, rng.normal(size=[len(keys), dim]).astype(np.float32))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        de.dump(folder / "chain", [table])
        seconds = publish_all(folder)
        loaded = {}
        for each in NAMES:
            model = folder / "models" / each
            de.export_saved_model(Lookups(table), model, "external", folder / each)
            loaded[each] = tf.saved_model.load(str(model))
        whole = vector_bytes(folder / "float32")
        size = {each: vector_bytes(folder / each) for each in NAMES}
        order = rng.permutation(rows)
        for each in loaded.values():  # each key once: files are verified, and in memory
            for chunk in np.array_split(order, 1 + rows // CHUNK):
                each.lookup(tf.constant(chunk))
        batches = [tf.constant(keys) for keys in rng.integers(0, rows, [16, BATCH])]
        found = {}
        for what in ("lookup", "pool"):

            def run(function: Any) -> float:
                began = time.perf_counter()
                for keys in batches:
                    function(keys)
                return len(batches) * BATCH / (time.perf_counter() - began) / 1e6

            functions = {each: getattr(model, what) for each, model in loaded.items()}
            figures = interleave({n: lambda f=f: run(f) for n, f in functions.items()}, repeats)
            found[what] = {each: statistics.median(figures[each]) for each in NAMES}
    print(f"\n{rows:,} rows of dimension {dim}")
    print(
        "format     bytes of vectors   publish   lookups       of float32  sums of 8     of float32"
    )
    for each in NAMES:
        lookup, pool = (found[what][each] for what in ("lookup", "pool"))
        print(
            f"{each:9}  {size[each] / rows:6.0f} = {size[each] / whole:5.3f} x   "
            f"{whole / seconds[each] / 1e9:4.2f} GB/s  {lookup:5.1f} M ids/s  "
            f"{lookup / found['lookup']['float32']:5.2f} x     {pool:5.1f} M ids/s  "
            f"{pool / found['pool']['float32']:5.2f} x"
        )


def area(is_positive: npt.NDArray[np.bool_], scores: npt.NDArray[np.float32]) -> float:
    """Returns the area under the ROC curve: how often a positive example has the higher score."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    positives = int(is_positive.sum())
    negatives = is_positive.size - positives
    above = ranks[is_positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def quality(what: str, model: keras.Model, inputs: Any, labels: npt.NDArray[Any]) -> None:
    """Prints the AUC of a model on a test set with the rows of each format."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        de.dump(folder / "chain", model)
        publish_all(folder)
        auc = {}
        for each in NAMES:
            de.load(folder / each, model, dense=None)
            scores = model.predict(inputs, batch_size=8192, verbose=0)
            auc[each] = area(labels.ravel() > 0, scores.ravel())
    print(f"\n{what}: AUC on {len(labels):,} rows")
    for each in NAMES:
        print(f"{each:9}  {auc[each]:.6f}  {auc[each] - auc['float32']:+.6f}")


def of_adult(dim: int, epochs: int) -> None:
    """Trains on the Adult data, and prints the quality."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import adult
    import network

    data = adult.load()
    keras.utils.set_random_seed(0)
    ids = keras.Input((data.train.ids.shape[1],), dtype="int64")
    layer = de.layers.Embedding(
        dim, initializer=keras.initializers.RandomNormal(stddev=0.01), name="embedding"
    )
    model = keras.Model(ids, network.probability_of(layer(ids)))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(1e-3)), "binary_crossentropy")
    model.fit(data.train.ids, data.train.labels, 256, epochs, verbose=0)
    quality(f"Adult, dimension {dim}", model, data.test.ids, data.test.labels)


def of_ratings(file: Path, dim: int, epochs: int) -> None:
    """Trains on MovieTweetings, and prints the quality."""
    ratings = online.read_ratings(file)
    ratings = ratings[np.argsort(ratings[:, 3], kind="stable")]
    train, test = np.split(ratings, [int(0.9 * len(ratings))])
    keras.utils.set_random_seed(0)
    model = online.build(float(train[:, 2].mean()), dim)
    columns = [[each[:, 0], each[:, 1]] for each in (train, test)]
    model.fit(columns[0], train[:, 2].astype(np.float32), 256, epochs, verbose=0)
    good = (test[:, 2] >= 8).astype(np.float32)
    quality(f"MovieTweetings, dimension {dim}", model, columns[1], good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4_000_000, help="of each table")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--ratings", type=Path, help="user::movie::rating::seconds")
    options = parser.parse_args()
    print(describe_machine())
    for dim in (16, 64):
        speed(options.rows, dim, options.repeats)
    for dim in (16, 64):
        of_adult(dim, options.epochs)
        if options.ratings is not None:
            of_ratings(options.ratings, dim, options.epochs)


if __name__ == "__main__":
    main()
