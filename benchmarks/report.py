"""Writes the results as a page with plots: one HTML file with embedded images.

Reads files of `python -m benchmarks --json FILE`, and also prints their table. Several files are
merged case by case:

    python -m benchmarks.report results.json --output benchmarks/report.html
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import (
    DENSE,
    OURS,
    STATIC,
    TFRA,
    Result,
    contenders_of,
    merge,
    read_json,
    table_lines,
)

COLOURS = {OURS: "#1b7837", DENSE: "#762a83", STATIC: "#878787", TFRA: "#2166ac"}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tf_dynemb benchmarks</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em }}
pre {{ font-size: 11px; overflow-x: auto; background: #f6f6f6; padding: 1em }}
img {{ max-width: 100% }}
</style></head><body>
<h1>tf_dynemb benchmarks</h1>
<p>{machine}</p>
<p>Medians of interleaved repeats in one process for each case; lines show the lowest and the
highest repeat. DenseHashTable and static (a tf.Variable whose ids are row numbers) are
TensorFlow's.</p>
{sections}
<h2>All figures</h2>
<pre>{table}</pre>
</body></html>
"""


def groups(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Groups results that share an axis: by unit, and by the first word of the case."""
    parts: dict[str, list[Result]] = {}
    for result in results:
        parts.setdefault(f"{result.case.split()[0]}, {result.unit}", []).append(result)
    return parts


def plot(title: str, results: list[Result]) -> bytes:
    """Draws bars of every contender for each case, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 0.9 + 0.62 * len(results)
    figure, axes = pyplot.subplots(figsize=(10, height), layout="constrained")
    names = contenders_of(results)
    thick = 0.8 / len(names)
    for row, result in enumerate(results):
        for place, name in enumerate(names):
            median = result.median(name)
            if median is None:
                continue
            values = result.values[name]
            spread = [[median - min(values)], [max(values) - median]]
            y = row + (place - (len(names) - 1) / 2) * thick
            label = name if row == 0 else None
            axes.barh(
                y,
                median,
                thick * 0.9,
                color=COLOURS[name],
                label=label,
                xerr=spread,
                error_kw={"ecolor": "#00000080", "elinewidth": 1},
            )
            end = (max(values), y)
            axes.annotate(f"{median:.3g}", end, (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(results)), [result.case for result in results])
    axes.invert_yaxis()
    axes.set_xlabel(
        f"{results[0].unit} ({'less' if results[0].less_is_better else 'more'} is better)"
    )
    axes.set_title(title)
    axes.legend(loc="best", fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def page(results: list[Result], machine: str) -> str:
    """Returns the whole page."""
    sections = []
    for title, part in groups(results).items():
        image = base64.b64encode(plot(title, part)).decode()
        alt = html.escape(title)
        sections.append(f'<h2>{alt}</h2>\n<img alt="{alt}" src="data:image/png;base64,{image}">')
    return PAGE.format(
        machine=html.escape(machine),
        sections="\n".join(sections),
        table=html.escape("\n".join(table_lines(results))),
    )


def main() -> None:
    """Reads the results and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="files written by --json")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/report.html"))
    options = parser.parse_args()
    results = merge(result for path in options.results for result in read_json(path))
    machine = json.loads(options.results[0].read_text())["machine"]
    print("\n".join(table_lines(results)))
    options.output.write_text(page(results, machine))
    print(f"{options.output}: {len(results)} cases")


if __name__ == "__main__":
    main()
