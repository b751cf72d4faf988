"""Draws the figures of README and docs/performance.md: python -m benchmarks.readme_figures.

- docs/figures/life.svg: a table from training to serving.
- docs/figures/speed.svg: speed relative to the peers, from a committed table of benchmarks/results.
- docs/figures/memory.svg: bytes of a row beyond its content, from another one.

The same results give the same bytes, so that a test can tell whether the figures are current.
"""

from __future__ import annotations

import argparse
import pathlib
import re
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPEED, OF_MEMORY = (
    RESULTS / "2026-11-30_cpu_epyc_peers.txt",
    RESULTS / "2026-12-01_cpu_epyc_memory.txt",
)
FIGURES = ROOT / "docs" / "figures"

PEERS = {
    "DenseHashTable": "#9aa5b1",
    "TFRA": "#d98e4a",
    "static": "#6aa6a0",
    "FBGEMM": "#b58bb5",
}
OURS, INK = "#2f5d8c", "#222222"
CASES = {
    "lookup, uniform, dim 16": "lookup",
    "upsert of present keys, dim 16": "upsert",
    "insert of new keys, table growing, dim 16": "insert, growing",
    "sparse forward, uniform, hotness 10": "26 tables, pooled",
    "sparse train adagrad, uniform, hotness 10": "26 tables, Adagrad",
    "sparse train adam, uniform, hotness 10": "26 tables, Adam",
}

MEMORY = {
    "memory beyond key, vector, dim 16": "no state",
    "memory beyond key, vector and adagrad state, dim 16": "Adagrad",
    "memory beyond key, vector and adam state, dim 16": "Adam",
}


def read_results(path: pathlib.Path) -> dict[str, dict[str, float]]:
    """Returns the figures of a table of benchmarks/results, by case and contender."""
    lines = path.read_text("utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("case  "))
    head = [name for name in re.split(r"\s{2,}", lines[first].strip()) if name != "±"]
    names = [name for name in head[2:] if not name.startswith("x ")]
    results = {}
    for line in lines[first + 2 :]:
        cells = re.split(r"\s{2,}", re.sub(r"\s+\d+%", "", line).strip())
        if len(cells) < 3:
            break
        values = dict(zip(names, cells[2:], strict=False))
        results[cells[0]] = {
            name: float(value.replace(",", "")) for name, value in values.items() if value != "-"
        }
    return results


def draw_speed(results: dict[str, dict[str, float]]) -> Any:
    """A group of bars for each case: how many times faster than each peer."""
    figure, axes = plt.subplots(figsize=(8, 3.2))
    width = 0.84 / len(PEERS)
    labelled: set[str] = set()
    for number, (peer, color) in enumerate(PEERS.items()):
        for position, case in enumerate(CASES):
            values = results[case]
            if peer not in values:
                continue
            ratio = values["tf_dynemb"] / values[peer]
            x = position + (number - (len(PEERS) - 1) / 2) * width
            label = peer if peer not in labelled else None
            labelled.add(peer)
            axes.bar(x, ratio, width * 0.92, color=color, label=label)
            axes.text(x, ratio + 0.1, f"{ratio:.1f}", ha="center", fontsize=7, color=INK)
    axes.axhline(1.0, color=OURS, linewidth=1)
    axes.set_xticks(range(len(CASES)), CASES.values(), fontsize=8)
    axes.set_ylabel("times faster than", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    labels = {
        "static": "static tf.Variable (no hash table)",
        "FBGEMM": "FBGEMM, as in TorchRec (no hash table)",
    }
    handles, peers = axes.get_legend_handles_labels()
    names = [labels.get(peer, peer) for peer in peers]
    axes.legend(handles, names, fontsize=8, frameon=False, loc="upper left")
    figure.tight_layout()
    return figure


def draw_memory(results: dict[str, dict[str, float]]) -> Any:
    """A group of bars for each case: bytes of a row, and at the peak of growth."""
    figure, axes = plt.subplots(figsize=(8, 2.8))
    colors = {"tf_dynemb": OURS, "DenseHashTable": PEERS["DenseHashTable"], "TFRA": PEERS["TFRA"]}
    for number, (name, color) in enumerate(colors.items()):
        for position, case in enumerate(MEMORY):
            usual, peak = results[case].get(name), results[f"{case}, peak"].get(name)
            if usual is None or peak is None:
                continue
            x = position + (number - 1) * 0.27
            label = name if position == 0 else None
            axes.bar(x, peak, 0.24, color=color, alpha=0.35)
            axes.bar(x, usual, 0.24, color=color, label=label)
            text = f"{usual:.0f}" if round(usual) == round(peak) else f"{usual:.0f}, {peak:.0f}"
            axes.text(x, peak + 4, text, ha="center", fontsize=7, color=INK)
    axes.set_xticks(range(len(MEMORY)), MEMORY.values(), fontsize=8)
    axes.set_ylabel("bytes per row", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    figure.tight_layout()
    return figure


def draw_life() -> Any:
    """Boxes from left to right: training, the chain of snapshots on disk, readers."""
    figure, axes = plt.subplots(figsize=(8, 2.4))
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 30)
    axes.axis("off")

    def box(x: float, y: float, w: float, h: float, text: str, color: str) -> None:
        shape = FancyBboxPatch(
            (x, y), w, h, boxstyle="round,pad=0.4", facecolor=color, edgecolor=INK, linewidth=0.8
        )
        axes.add_patch(shape)
        axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=8, color=INK)

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
        style = {"arrowstyle": "-|>", "mutation_scale": 10, "linewidth": 0.9, "color": INK}
        axes.add_patch(FancyArrowPatch(start, end, **style))
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 1.2)
        axes.text(*middle, text, ha="center", fontsize=7, color=INK)

    box(
        1,
        8,
        24,
        15,
        "training\n\nnew ids get a row;\nrows: vector, optimizer\nstate, times",
        "#dce8f4",
    )
    box(44, 8, 8, 15, "base", "#f2e3cf")
    for i, x in enumerate((55, 61.5, 68)):
        box(x, 8, 4.5, 15, f"Δ{i + 1}", "#f7efe2")
    box(86, 18, 13, 8, "serving.Reader\n(numpy only)", "#ddeede")
    box(86, 4, 13, 8, "de.load,\nde.apply_delta", "#ddeede")
    arrow((26, 15.5), (43.3, 15.5), "dump, then\n")
    axes.text(34.6, 11.5, "incremental_dump", ha="center", fontsize=7, color=INK)
    arrow((73.5, 17), (85.3, 22), "follow   ")
    arrow((73.5, 14), (85.3, 8))
    axes.text(58, 25.5, "a directory of .npy columns with checksums", ha="center", fontsize=7)
    axes.text(13, 3.5, "one process, or many ranks", ha="center", fontsize=7, color=INK)
    axes.text(58, 3.5, "rows changed and ids deleted since", ha="center", fontsize=7, color=INK)
    return figure


def save(figure: Any, path: pathlib.Path) -> None:
    """Writes an SVG without a date or random ids."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Draws the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=FIGURES, help="default: %(default)s")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams.update({"svg.hashsalt": "tf_dynemb", "svg.fonttype": "none"})
    save(draw_life(), folder / "life.svg")
    save(draw_speed(read_results(SPEED)), folder / "speed.svg")
    save(draw_memory(read_results(OF_MEMORY)), folder / "memory.svg")


if __name__ == "__main__":
    main()
