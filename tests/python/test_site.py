"""The site that `make docs` builds: its API reference has every public name; nothing is broken."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys

import pytest
from example_runs import ROOT

import tf_dynemb as de
from tf_dynemb import tfra

pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").is_file(), reason="no sources: this tests a wheel"
)
MODULES = (de, de.layers, de.callbacks, de.serving, de.storage, de.oneembedding, tfra)


def documented():
    text = "".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    return set(re.findall(r"^\.\. auto(?:class|function):: tf_dynemb\.(\S+)$", text, re.M))


def public():
    for module in MODULES:
        prefix = "" if module is de else module.__name__.removeprefix("tf_dynemb.") + "."
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                yield prefix + name, value


def test_the_reference_has_every_public_name():
    names = {name for name, _ in public()}
    assert len(names) > 80
    assert not names - documented()


def test_every_public_name_has_a_docstring():
    # Its own: a class without one would show that of a base class.
    assert not [name for name, value in public() if not value.__doc__]


def test_the_contents_have_every_page():
    contents = (ROOT / "docs/contents.txt").read_text()
    listed = set(re.findall(r"<(\S+)>$", contents, re.M))
    pages = {str(each.relative_to(ROOT / "docs").with_suffix("")) for each in documents()}
    assert pages == {each for each in listed if not each.startswith("source/")}


def documents():
    return (ROOT / "docs").rglob("*.md")


def test_it_builds_without_a_warning():
    pytest.importorskip("sphinx")
    command = [sys.executable, str(ROOT / "tools/build_site.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
