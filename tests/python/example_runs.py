"""Runs the examples, each in a separate process; imports their modules; code of documents."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run_python(arguments: list[str], folder: Path, warm: bool = True) -> str:
    """Runs Python in `folder` and returns its output; fails with its errors."""
    run = warm_python.run if warm else warm_python.run_cold
    done = run(arguments, folder, TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def examples_module(name: str) -> ModuleType:
    """Imports a module of the examples."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def code_blocks(page: str) -> list[str]:
    """Returns the blocks of Python code in a Markdown file; [] in a run without the documents."""
    path = ROOT / page
    text = path.read_text() if path.exists() else ""
    return re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
