"""tools/release.py: what it refuses, what it changes, and that a failure leaves the checkout alone.

Nothing is built: temporary repositories have stand-ins for make's targets and for auditwheel.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from example_runs import ROOT

TOOL = ROOT / "tools" / "release.py"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="no sources: this tests a wheel")

DATE = datetime.date(2026, 11, 30)
CHANGELOG = """# Changes

## Unreleased

Added
- A table
  of two lines.

Fixed
- A fault.

## 0.1.0 (2026-01-02)

- The first.
"""
VERSION = '"""Versions."""\n\n__version__ = "0.1.0"\n\nTENSORFLOW_VERSION = "2.21"\n'
CITATION = "cff-version: 1.2.0\ntitle: A title\nversion: 0.1.0\nlicense: Apache-2.0\n"
WHEEL = "tf_dynemb-0.2.0-py3-none-manylinux_2_28_x86_64.whl"
SHOWN = {
    "sym_tag": "manylinux_2_27_x86_64",
    "external_libs": {"libtensorflow_framework.so.2": None, "libcuda.so.1": None},
    "unsupported_isa": False,
}
TABLE = """\
| Python | TensorFlow | Keras | NumPy | quickstart |
|---|---|---|---|---|
| 3.10 | 2.18 | this Python is not installed |
| 3.11.7 | 2.21.0 | 3.15.1 | 2.4.6 | test AUC 0.9121 |
| 3.12 | 2.21 | failed: no operators |
"""
# `make wheels` leaves a wheel, and tools beside it. It gets no variable of `make release`.
MAKEFILE = """\
wheels:
	@test -z "$(ARGS)$(VERSION)$$PYTHONPATH"
	@mkdir -p dist build/wheels/tools/bin && cp wheel dist/{wheel}
	@cp auditwheel build/wheels/tools/bin
test-wheels:
	@cat table
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("release", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module  # for dataclasses
    spec.loader.exec_module(module)
    yield module
    del sys.modules["release"]


@pytest.fixture(autouse=True)
def quiet_git(monkeypatch, tmp_path):
    """Without the configuration of the user and the system."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in [each for each in os.environ if re.match(r"GIT_(AUTHOR|COMMITTER)|EMAIL$", each)]:
        monkeypatch.delenv(name)


def git(folder, *words):
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    (root / "tf_dynemb").mkdir(parents=True)
    for name, text in {
        "CHANGELOG.md": CHANGELOG,
        "CITATION.cff": CITATION,
        "tf_dynemb/_version.py": VERSION,
        ".gitignore": "build/\ndist/\n",
        "Makefile": MAKEFILE.format(wheel=WHEEL),
        "table": TABLE,
        "auditwheel": f"#!/bin/sh\ncat <<'E'\n{json.dumps(SHOWN)}\nE\n",
    }.items():
        (root / name).write_text(text)
    (root / "auditwheel").chmod(0o755)
    with zipfile.ZipFile(root / "wheel", "w") as content:
        content.writestr("tf_dynemb/_dynemb_ops_tf2.21.so", b"ELF")
    for name in ("WORKSPACE", "THIRD_PARTY_NOTICES.md"):
        shutil.copy(ROOT / name, root)
    git(root, "init", "-q", "-b", "main")
    git(root, "config", "user.name", "A releaser")
    git(root, "config", "user.email", "releaser@example.com")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Begin")
    (root / "dist").mkdir()
    (root / "dist" / "earlier.whl").write_text("the earlier one")
    return root


def state(root):
    """Everything of a checkout that a release changes."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    apart = (root / ".git", root / "build")
    return (
        git(root, "rev-parse", "HEAD"),
        git(root, "branch", "--show-current"),
        git(root, "for-each-ref"),
        git(root, "status", "--porcelain"),
        {path: path.read_bytes() for path in files if not set(apart) & set(path.parents)},
    )


def sdist(release):
    (release.dist / f"tf_dynemb-{release.version}.tar.gz").write_text("sources")


def steps_of(tool):
    """The steps, without those for which packages would have to be installed."""
    others = {"build_sdist": sdist, "check_metadata": None, "try_sdist": None, "write_bom": None}
    steps = [others.get(step.__name__, step) for step in tool.STEPS]
    assert others.keys() < {step.__name__ for step in tool.STEPS}
    return [step for step in steps if step is not None]


class TestVersions:
    @pytest.mark.parametrize("text", ["0.2.0", "0.1.1", "1.0.0", "0.2.0rc1", "0.10.0"])
    def test_newer_ones(self, tool, text):
        tool.check_version(text, "0.1.0")

    @pytest.mark.parametrize("text", ["", "two", "0.2.x", "0.2.0-beta-gamma", "--dry-run"])
    def test_not_pep_440(self, tool, text):
        with pytest.raises(tool.ReleaseError, match=f"VERSION='{text}' is not a version by PEP"):
            tool.check_version(text, "0.1.0")

    @pytest.mark.parametrize(
        "text", ["v0.2.0", "0.2", "0.2.0.0", "0.2.0-rc1", "0.2.0+cu12", "1!0.2.0", "0.02.0"]
    )
    def test_another_form(self, tool, text):
        with pytest.raises(tool.ReleaseError, match=re.escape(f"{text!r} is not of the form")):
            tool.check_version(text, "0.1.0")

    @pytest.mark.parametrize("text", ["0.1.0", "0.0.9", "0.1.0rc1"])
    def test_not_newer(self, tool, text):
        with pytest.raises(tool.ReleaseError, match=r"is not newer than 0\.1\.0"):
            tool.check_version(text, "0.1.0")

    def test_the_version_of_this_repository_is_found_and_set(self, tool):
        text = (ROOT / "tf_dynemb" / "_version.py").read_text()
        assert re.fullmatch(r"\d+\.\d+\.\d+\w*", tool.version_of(text))
        new = tool.with_version(text, '"9.8.7"', "__version__ = ")
        assert tool.version_of(new) == "9.8.7"
        assert len(new.splitlines()) == len(text.splitlines())

    def test_two_versions_are_refused(self, tool):
        with pytest.raises(tool.ReleaseError, match="2 lines"):
            tool.with_version(CITATION + CITATION, "0.2.0", "version: ")
        with pytest.raises(tool.ReleaseError, match="2 lines"):
            tool.version_of(VERSION + VERSION)


class TestChangelog:
    def test_closed(self, tool):
        text = tool.closed(CHANGELOG, "0.2.0", DATE)
        begins = "# Changes\n\n## Unreleased\n\n## 0.2.0 (2026-11-30)\n\nAdded\n- A table\n"
        assert text.startswith(begins)
        assert text.replace("## Unreleased\n\n## 0.2.0 (2026-11-30)", "## Unreleased") == CHANGELOG
        notes = "Added\n- A table\n  of two lines.\n\nFixed\n- A fault.\n"
        assert tool.notes_of(text, "0.2.0") == notes
        assert tool.notes_of(text, "0.1.0") == "- The first.\n"

    def test_that_of_this_repository(self, tool):
        text = (ROOT / "CHANGELOG.md").read_text()
        unreleased = tool._section(text, "Unreleased")
        if "\n- " in unreleased:  # otherwise, a release has just been made
            assert tool.notes_of(tool.closed(text, "99.0.0", DATE), "99.0.0").strip() == unreleased

    @pytest.mark.parametrize("body", ["", "\n\n", "\nAdded\n\nFixed\n"])
    def test_an_empty_section(self, tool, body):
        with pytest.raises(tool.ReleaseError, match="lists nothing under `## Unreleased`"):
            tool.closed(f"# Changes\n\n## Unreleased\n{body}\n## 0.1.0\n\n- A.\n", "0.2.0", DATE)

    def test_no_section_or_two(self, tool):
        for text, count in (("# Changes\n", 0), (CHANGELOG + CHANGELOG, 2)):
            with pytest.raises(tool.ReleaseError, match=f"has {count} sections"):
                tool.closed(text, "0.2.0", DATE)

    def test_a_version_that_has_a_section(self, tool):
        text = CHANGELOG + "\n## 0.2.0 (2026-01-02)\n\n- A.\n"
        with pytest.raises(tool.ReleaseError, match=r"section of 0\.2\.0 already"):
            tool.closed(text, "0.2.0", DATE)


class TestRefusals:
    """The release stops before anything is created."""

    def refused(self, tool, checkout, capsys, *arguments):
        before = state(checkout)
        assert tool.main(["0.2.0", *arguments], checkout) == 1
        assert state(checkout) == before
        assert not (checkout / "build").exists()
        return capsys.readouterr().err

    @pytest.mark.parametrize("name", ["CHANGELOG.md", "new"])
    @pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
    def test_a_dirty_tree(self, tool, checkout, capsys, name, arguments):
        with open(checkout / name, "a") as file:
            file.write("more\n")
        text = self.refused(tool, checkout, capsys, *arguments)
        assert "has changes that are not committed" in text
        assert name in text

    def test_another_branch(self, tool, checkout, capsys):
        git(checkout, "checkout", "-q", "-b", "topic")
        text = self.refused(tool, checkout, capsys)
        assert "this is the branch topic, and releases are made from main" in text
        git(checkout, "checkout", "-q", "--detach")
        assert "this is no branch" in self.refused(tool, checkout, capsys)

    def test_a_tag_that_exists(self, tool, checkout, capsys):
        git(checkout, "tag", "v0.2.0")
        assert "there is a tag v0.2.0 already" in self.refused(tool, checkout, capsys)

    def test_an_empty_section(self, tool, checkout, capsys):
        (checkout / "CHANGELOG.md").write_text("# Changes\n\n## Unreleased\n")
        git(checkout, "commit", "-q", "-a", "-m", "Empty")
        assert "lists nothing under" in self.refused(tool, checkout, capsys)

    def test_an_old_version(self, tool, checkout, capsys):
        (checkout / "tf_dynemb/_version.py").write_text(VERSION.replace("0.1.0", "0.2.0"))
        git(checkout, "commit", "-q", "-a", "-m", "Newer")
        assert "is not newer than 0.2.0" in self.refused(tool, checkout, capsys)

    def test_a_linked_project_without_a_description(self, tool, checkout, capsys):
        with open(checkout / "THIRD_PARTY_NOTICES.md", "a") as file:
            file.write("\n## Another\n\nIts license.\n")
        git(checkout, "commit", "-q", "-a", "-m", "Link")
        assert "'Another'" in self.refused(tool, checkout, capsys)


class TestReleases:
    def test_a_release(self, tool, checkout, capsys, monkeypatch):
        # As `make release VERSION=0.2.0 ARGS=...` of a developer.
        monkeypatch.setenv("MAKEFLAGS", " -- VERSION=0.2.0 ARGS=--branch\\ main")
        monkeypatch.setenv("VERSION", "0.2.0")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        start = git(checkout, "rev-parse", "HEAD")
        tool.make(tool.Release(checkout, "0.2.0"), False, steps_of(tool))
        today = datetime.date.today()
        assert (checkout / "CHANGELOG.md").read_text() == tool.closed(CHANGELOG, "0.2.0", today)
        assert (checkout / "CITATION.cff").read_text() == CITATION.replace("0.1.0", "0.2.0")
        assert (checkout / "tf_dynemb/_version.py").read_text() == VERSION.replace("0.1.0", "0.2.0")
        assert git(checkout, "status", "--porcelain") == ""
        assert git(checkout, "rev-parse", "HEAD~1") == start
        assert git(checkout, "log", "-1", "--format=%an %ae %s") == (
            "A releaser releaser@example.com Version 0.2.0"
        )
        assert git(checkout, "cat-file", "-t", "v0.2.0") == "tag"
        assert git(checkout, "rev-parse", "v0.2.0^{commit}") == git(checkout, "rev-parse", "HEAD")
        names = ["SHA256SUMS", WHEEL, "tf_dynemb-0.2.0.tar.gz"]
        assert sorted(path.name for path in (checkout / "dist").iterdir()) == names
        checked = subprocess.run(
            ["sha256sum", "--strict", "-c", "SHA256SUMS"],
            cwd=checkout / "dist",
            capture_output=True,
            text=True,
            check=True,
        )
        assert checked.stdout.split() == [WHEEL + ":", "OK", "tf_dynemb-0.2.0.tar.gz:", "OK"]

        printed = capsys.readouterr().out
        assert re.search(rf"  {WHEEL}, \d+ bytes, without device code\n", printed)
        assert "not tried, because this machine lacks the Python: 3.10 with 2.18\n" in printed
        following = printed.partition("nothing is published yet")[2]
        for command in (
            "git push --atomic origin main v0.2.0",
            "twine upload dist/*.whl dist/*.tar.gz",
            "gh release create v0.2.0",
        ):
            assert command in following
        (notes,) = re.findall(r"--notes-file (\S+)", following)
        text = (checkout / "CHANGELOG.md").read_text()
        assert (checkout / notes).read_text() == tool.notes_of(text, "0.2.0")
        (undo,) = re.findall(r"take it back: (.*)\)", following)
        subprocess.run(["bash", "-c", undo], cwd=checkout, check=True, capture_output=True)
        assert git(checkout, "rev-parse", "HEAD") == start
        assert git(checkout, "tag") == ""

    def test_a_dry_run(self, tool, checkout, capsys):
        before = state(checkout)
        release = tool.Release(checkout, "0.2.0")
        for _ in range(2):  # it can be repeated
            tool.make(release, True, steps_of(tool))
            assert state(checkout) == before
        assert (release.dist / WHEEL).exists()
        assert git(release.clone, "cat-file", "-t", "v0.2.0") == "tag"
        assert git(release.clone, "status", "--porcelain") == ""
        printed = capsys.readouterr().out
        assert "the checkout is unchanged" in printed
        assert "twine upload" not in printed

    def test_from_another_branch(self, tool, checkout):
        git(checkout, "checkout", "-q", "-b", "releases/0.1")
        with open(checkout / "CHANGELOG.md", "a") as file:
            file.write("- Only here.\n")
        git(checkout, "commit", "-q", "-a", "-m", "More")
        main = git(checkout, "rev-parse", "main")
        options = ["0.1.1", "--branch", "releases/0.1"]
        assert tool.main(options, checkout, [tool.prepare, with_dist]) == 0
        assert git(checkout, "branch", "--show-current") == "releases/0.1"
        assert git(checkout, "rev-parse", "main") == main
        assert "- Only here." in git(checkout, "show", "v0.1.1:CHANGELOG.md")

    @pytest.mark.parametrize("done", range(1, 10))
    def test_a_step_that_fails(self, tool, checkout, capsys, done):
        def fail(release):
            for name in ("CHANGELOG.md", "half"):
                (release.clone / name).write_text("half")
            raise tool.ReleaseError("planted")

        kept = {"prepare", "build_wheel", "check_platform", "try_wheel", "write_sums"}
        steps = [step if step.__name__ in kept else lambda _: None for step in tool.STEPS]
        before = state(checkout)
        assert tool.main(["0.2.0"], checkout, [*steps[:done], fail]) == 1
        error = capsys.readouterr().err
        assert "stopped, and the checkout is unchanged: planted" in error
        assert state(checkout) == before

    def test_an_error_of_the_file_system(self, tool, checkout, capsys):
        (checkout / "build").mkdir()
        (checkout / "build" / "release").write_text("no folder")
        before = state(checkout)
        assert tool.main(["0.2.0"], checkout) == 1
        assert "the checkout is unchanged: " in capsys.readouterr().err
        assert state(checkout) == before

    def test_without_a_name_to_commit_under(self, tool, checkout, capsys):
        git(checkout, "config", "user.useConfigOnly", "true")
        git(checkout, "config", "--unset", "user.email")
        before = state(checkout)
        assert tool.main(["0.2.0"], checkout) == 1
        assert "failed: git commit" in capsys.readouterr().err
        assert state(checkout) == before

    @pytest.mark.parametrize("meanwhile", ["commit", "edit", "tag", "branch"])
    def test_a_checkout_that_was_used_meanwhile(self, tool, checkout, meanwhile):
        def use(release):
            with_dist(release)
            if meanwhile == "tag":
                git(checkout, "tag", "v0.2.0", "-m", "by another")
            elif meanwhile == "branch":
                git(checkout, "checkout", "-q", "-b", "topic")
            else:
                (checkout / "CITATION.cff").write_text("edited")
            if meanwhile == "commit":
                git(checkout, "commit", "-q", "-a", "-m", "Edit")
            states.append(state(checkout))

        states = []
        with pytest.raises(tool.ReleaseError):
            tool.make(tool.Release(checkout, "0.2.0"), False, [tool.prepare, use])
        assert [state(checkout)] == states

    def test_the_names_in_the_source_distribution_are_printed_only_if_it_fails(
        self, tool, checkout, capfd, monkeypatch
    ):
        release = tool.Release(checkout, "0.2.0")
        release.place.mkdir(parents=True)
        python = checkout / "python"
        python.write_text("#!/bin/sh\necho copying a\nexit ${FAILS:-0}\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        tool.build_sdist(release)
        assert capfd.readouterr().out == ""
        monkeypatch.setenv("FAILS", "1")
        with pytest.raises(tool.ReleaseError, match="copying a"):
            tool.build_sdist(release)


def with_dist(release):
    release.dist.mkdir()
    shutil.copy(release.clone / "wheel", release.dist / WHEEL)


class TestChecks:
    def faults(self, tool, name=WHEEL, **shown):
        return " ".join(tool.platform_faults({**SHOWN, **shown}, name))

    def test_the_platform(self, tool):
        assert self.faults(tool) == ""
        assert self.faults(tool, sym_tag="manylinux_2_28_x86_64") == ""
        for tag in ("manylinux_2_29_x86_64", "manylinux_3_1_x86_64", "linux_x86_64"):
            assert self.faults(tool, sym_tag=tag) == f"its symbols need {tag}"
        assert "libssl.so.3" in self.faults(tool, external_libs={"libssl.so.3": None})
        assert "every x86-64" in self.faults(tool, unsupported_isa=True)
        name = WHEEL.replace("manylinux_2_28", "linux")
        assert "its name" in self.faults(tool, name)

    def test_the_platform_is_that_of_the_wheel_that_is_built(self, tool):
        assert f"--plat {tool.PLATFORM} " in (ROOT / "tools" / "wheels.sh").read_text()
        assert "glibc 2.28" in (ROOT / "docs" / "policies.md").read_text()

    def test_a_wheel_for_newer_systems_stops_the_release(self, tool, checkout):
        path = checkout / "auditwheel"
        path.write_text(path.read_text().replace("manylinux_2_27", "manylinux_2_34"))
        git(checkout, "commit", "-q", "-a", "-m", "Newer")
        with pytest.raises(tool.ReleaseError, match="need manylinux_2_34_x86_64"):
            tool.make(tool.Release(checkout, "0.2.0"), True, steps_of(tool))

    def test_pairs(self, tool):
        assert tool.pairs_of(TABLE) == (["3.11.7 with 2.21.0"], ["3.10 with 2.18"])

    def test_a_quickstart_that_nothing_ran_stops_the_release(self, tool, checkout):
        (checkout / "table").write_text(TABLE.replace("test AUC", "failed:"))
        git(checkout, "commit", "-q", "-a", "-m", "Fail")
        with pytest.raises(tool.ReleaseError, match="ran with no Python"):
            tool.make(tool.Release(checkout, "0.2.0"), True, steps_of(tool))


def python_packages():
    """What cyclonedx-py writes of an environment."""
    numpy = {"type": "library", "bom-ref": "numpy==2.0", "name": "numpy", "version": "2.0"}
    root = {"type": "library", "bom-ref": "root-component", "name": "tf_dynemb"}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": [numpy],
        "dependencies": [
            {"ref": "numpy==2.0"},
            {"ref": "root-component", "dependsOn": ["numpy==2.0"]},
        ],
    }


class TestParts:
    @pytest.mark.parametrize("device", [True, False])
    def test_what_is_linked_is_listed(self, tool, device):
        parts = tool.linked_parts(ROOT, device)
        bom = python_packages()
        tool.with_parts(bom, "0.2.0", parts)
        assert bom["metadata"]["component"]["version"] == "0.2.0"
        assert bom["metadata"]["component"]["purl"] == "pkg:pypi/tf-dynemb@0.2.0"
        names = {each["name"]: each["bom-ref"] for each in bom["components"]}
        assert names.keys() == {"numpy", "Gloo", *(["CUDA Runtime"] if device else [])}
        depends = {each["ref"]: each.get("dependsOn", []) for each in bom["dependencies"]}
        assert depends["root-component"] == sorted(names.values())
        assert depends.keys() == {"root-component", *names.values()}

    def test_the_source_of_gloo_is_the_one_that_is_built(self, tool):
        (gloo,) = tool.linked_parts(ROOT, False)
        (source,) = [each for each in gloo["externalReferences"] if "hashes" in each]
        workspace = (ROOT / "WORKSPACE").read_text()
        assert f'"{source["url"]}"' in workspace
        assert f'sha256 = "{source["hashes"][0]["content"]}"' in workspace

    def test_it_is_cyclonedx(self, tool):
        validation = pytest.importorskip("cyclonedx.validation.json")
        schema = pytest.importorskip("cyclonedx.schema")
        bom = python_packages()
        tool.with_parts(bom, "0.2.0", tool.linked_parts(ROOT, True))
        validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
        assert validator.validate_str(json.dumps(bom)) is None
        bom["components"][0]["licenses"][0]["license"]["id"] = "no license"
        assert validator.validate_str(json.dumps(bom)) is not None
