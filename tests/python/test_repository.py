"""The files that a code host reads, and links between documents."""

from __future__ import annotations

import re

import pytest
from example_runs import ROOT

from tf_dynemb._version import __version__

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").is_file(), reason="no sources: this tests a wheel"
)


def heading(line):
    """The anchor of a heading, as GitHub makes it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def without_code(text):
    return re.sub(r"`[^`\n]+`(?!\])", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def documents():
    folders = (ROOT, *(ROOT / each for each in ("docs", "benchmarks", "examples", "deploy")))
    return [path for folder in folders for path in sorted(folder.glob("*.md"))]


def test_links_lead_somewhere():
    assert len(documents()) > 25
    broken = []
    for path in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            place = (path.parent / file).resolve() if file else path
            if not place.exists():
                broken.append(f"{path.name}: {target}")
            elif anchor and place.suffix == ".md":
                lines = place.read_text().splitlines()
                if anchor not in {heading(line) for line in lines if line.startswith("#")}:
                    broken.append(f"{path.name}: {target}")
    assert not broken


def test_workflows_call_targets_of_make():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = set()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                called |= set(re.findall(r"^make ([a-z-]+)(?: |$)", step.get("run", ""), re.M))
    assert {"lint", "test", "sanitize", "wheels", "release"} <= called <= targets


def test_forms_of_issues_have_questions():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        assert any(each.get("validations", {}).get("required") for each in form["body"])


def test_the_citation_has_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
