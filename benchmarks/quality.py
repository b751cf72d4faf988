"""Quality: the quickstart with hash tables and with `keras.layers.Embedding`, over seeds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import OURS, STATIC, Result, finish, parser_for

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart.py"
EMBEDDINGS = {OURS: "dynamic", STATIC: "keras"}
LEAST_AUC = 0.911
LARGEST_GAP = 0.001


def train(embedding: str, seed: int) -> dict[str, float]:
    """Runs the quickstart in a separate process and returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(QUICKSTART), "--quiet", "--embedding", embedding]
        command += ["--seed", str(seed), "--output-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "metrics.json").read_text())


def main() -> int:
    """Prints both means; returns 1 if ours misses the goal."""
    parser = parser_for(__doc__)
    parser.set_defaults(repeats=3)
    options = parser.parse_args()

    runs: dict[str, list[dict[str, float]]] = {name: [] for name in EMBEDDINGS}
    for seed in range(options.repeats):
        for name, embedding in EMBEDDINGS.items():
            runs[name].append(train(embedding, seed))
    results = [
        Result(
            f"quickstart: {metric}, mean of {options.repeats} seeds",
            unit,
            {name: [statistics.mean(run[metric] for run in runs[name])] for name in EMBEDDINGS},
            less_is_better=metric == "logloss",
        )
        for metric, unit in (
            ("auc", "AUC"),
            ("accuracy", "part"),
            ("logloss", "nats"),
            ("rows_per_second", "rows/s"),
        )
    ]
    for name, each in runs.items():
        print(f"{name}: AUC by seed " + ", ".join(f"{run['auc']:.4f}" for run in each))
    finish(results, options.json)

    auc = {name: results[0].median(name) or 0.0 for name in EMBEDDINGS}
    gap = abs(auc[OURS] - auc[STATIC])
    good = auc[OURS] >= LEAST_AUC and gap <= LARGEST_GAP
    print(
        f"AUC {auc[OURS]:.4f} (wanted: at least {LEAST_AUC}), {gap:.4f} from "
        f"keras.layers.Embedding (wanted: at most {LARGEST_GAP}): {'pass' if good else 'FAIL'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
