"""The notebooks of examples/notebooks: each runs, and is the same as its source."""

from __future__ import annotations

import importlib.util
import itertools
import os

import pytest
from example_runs import EXAMPLES

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = EXAMPLES / "notebooks"
NAMES = ("first_model", "online_loop", "serving", "what_stays")


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_they_are_found():
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == {
        "README.md",
        *(name + suffix for name in NAMES for suffix in (".py", ".ipynb")),
    }


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_same_as_its_source(name):
    source, notebook = (jupytext.read(FOLDER / f"{name}{suffix}") for suffix in (".py", ".ipynb"))
    command = "jupytext --to ipynb --update examples/notebooks/*.py"
    assert cells(notebook) == cells(source), f"run {command}"
    assert notebook.metadata.kernelspec == source.metadata.kernelspec, f"run {command}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "it has outputs"


@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_before_each_cell(name):
    types = [cell.cell_type for cell in jupytext.read(FOLDER / f"{name}.ipynb").cells]
    assert types[0] == "markdown"
    assert ("code", "code") not in set(itertools.pairwise(types))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_leaves_nothing(tmp_path, name):
    """All cells run, one after the other, in a process that Jupyter would start."""
    if name == "serving" and importlib.util.find_spec("kserve") is None:
        pytest.skip("needs the extra `serve`")
    folder, temporary = tmp_path / "here", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "IPYTHONDIR": str(tmp_path / "ipython")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    notebook = jupytext.read(FOLDER / f"{name}.ipynb")
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(cwd=str(folder), env=environment)
    assert list(folder.iterdir()) == []
    assert list(temporary.iterdir()) == []
