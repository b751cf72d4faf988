"""Makes a release, up to the upload: `make release VERSION=0.2.0`.

Everything happens in a clone, build/release/checkout: the changelog is closed, the version set, the
result committed and tagged; the wheel and the source distribution are built, checked and tried.
When all of that has succeeded, the commit, the tag and dist/ are taken over into the checkout. If a
step fails, or with --dry-run, the checkout is left unchanged, and the clone shows what there is.
Nothing is pushed or uploaded: the last lines say what a person does next.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bazel"))

import library  # noqa: E402  (in bazel/, as for setup.py)

CHANGELOG, VERSION, CITATION = "CHANGELOG.md", "tf_dynemb/_version.py", "CITATION.cff"
NOTICES = "THIRD_PARTY_NOTICES.md"

# What docs/policies.md promises: glibc 2.28. The rest of a system's libraries comes with TensorFlow
# or with a driver.
PLATFORM = "manylinux_2_28_x86_64"
FROM_ELSEWHERE = re.compile(r"libtensorflow|libcuda")


class ReleaseError(Exception):
    """A release cannot be made; the message says why."""


@dataclasses.dataclass(frozen=True)
class Release:
    """A release of `version` from the branch `branch` of the checkout `root`."""

    root: Path
    version: str
    branch: str = "main"

    @property
    def tag(self) -> str:
        return f"v{self.version}"

    @property
    def place(self) -> Path:
        return self.root / "build" / "release"

    @property
    def clone(self) -> Path:
        # Always the same folder: Bazel keeps what it has built for each.
        return self.place / "checkout"

    @property
    def dist(self) -> Path:
        return self.clone / "dist"

    @property
    def notes(self) -> Path:
        return self.place / "notes.md"

    @property
    def pairs(self) -> Path:
        """The table of `make test-wheels`."""
        return self.place / "wheel_versions.txt"

    @property
    def tried(self) -> Path:
        """A venv with the source distribution."""
        return self.place / "venv"

    def one(self, pattern: str) -> Path:
        """Returns the only file of dist/ that matches."""
        found = sorted(self.dist.glob(pattern))
        if len(found) != 1:
            names = [path.name for path in found]
            raise ReleaseError(f"dist/{pattern} matches {names}, not one file")
        return found[0]


# Texts.


def check_version(text: str, current: str) -> None:
    """Raises ReleaseError unless `text` can be the version after `current`."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise ReleaseError(
            f"VERSION={text!r} is not a version by PEP 440: make release VERSION=0.2.0"
        ) from None
    if str(version) != text or len(version.release) != 3 or version.local or version.epoch:
        raise ReleaseError(
            f"VERSION={text!r} is not of the form major.minor.patch, as in 0.2.0 or 0.2.0rc1"
        )
    if version <= Version(current):
        raise ReleaseError(f"VERSION={text!r} is not newer than {current}, the one of {VERSION}")


def _section(changelog: str, heading: str) -> str:
    found = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if len(found) != 1:
        raise ReleaseError(f"{CHANGELOG} has {len(found)} sections `## {heading}`, not one")
    return str(found[0]).strip()


def closed(changelog: str, version: str, date: datetime.date) -> str:
    """Returns the changelog with the unreleased changes under the version."""
    if not re.search(r"^- ", _section(changelog, "Unreleased"), re.M):
        raise ReleaseError(f"{CHANGELOG} lists nothing under `## Unreleased`")
    if re.search(rf"^## {re.escape(version)}\b", changelog, re.M):
        raise ReleaseError(f"{CHANGELOG} has a section of {version} already")
    return changelog.replace("## Unreleased\n", f"## Unreleased\n\n## {version} ({date})\n", 1)


def notes_of(changelog: str, version: str) -> str:
    """Returns the text of a version's section."""
    return _section(changelog, rf"{re.escape(version)} \([0-9-]+\)") + "\n"


def version_of(text: str) -> str:
    """Returns the version that the text of _version.py has."""
    found = re.findall(r'^__version__ = "(.*)"$', text, re.M)
    if len(found) != 1:
        raise ReleaseError(f"{VERSION} has {len(found)} lines with a version, not one")
    return str(found[0])


def with_version(text: str, version: str, line: str) -> str:
    """Returns a text with the version in a line that is now `line`, such as `version: .*`."""
    new, count = re.subn(rf"^({line}).*$", rf"\g<1>{version}", text, flags=re.M)
    if count != 1:
        raise ReleaseError(f"{count} lines begin with {line!r}, not one")
    return new


def platform_faults(shown: dict[str, Any], wheel: str) -> list[str]:
    """Returns why a wheel breaks the promise of PLATFORM, from `auditwheel show --json`."""
    faults = []
    if not wheel.endswith(f"-py3-none-{PLATFORM}.whl"):
        faults.append(f"its name does not end with py3-none-{PLATFORM}")
    needed = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", shown["sym_tag"])
    promised = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", PLATFORM)
    assert promised is not None
    if needed is None or tuple(map(int, needed.groups())) > tuple(map(int, promised.groups())):
        faults.append(f"its symbols need {shown['sym_tag']}")
    others = [name for name in shown["external_libs"] if not FROM_ELSEWHERE.match(name)]
    if others:
        faults.append(f"it needs {', '.join(others)} from the system")
    if shown["unsupported_isa"]:
        faults.append("it does not run on every x86-64")
    return faults


def pairs_of(table: str) -> tuple[list[str], list[str]]:
    """Returns the pairs of Python and TensorFlow that ran the quickstart, and those that did not.

    Args:
        table: the output of `make test-wheels`
    """
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines()]
    ran = [f"{row[0]} with {row[1]}" for row in rows if row[-1].startswith("test AUC")]
    left = [f"{row[0]} with {row[1]}" for row in rows if row[-1].endswith("not installed")]
    return ran, left


def sums(paths: Iterable[Path]) -> str:
    """Returns the lines that `sha256sum --check` reads."""
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(paths)
    )


# The list of parts.


def linked_parts(root: Path, device_code: bool) -> list[dict[str, Any]]:
    """Returns what the operator library contains of other projects, as components of CycloneDX."""
    archive = re.search(
        r'name = "gloo".*?sha256 = "(\w{64})".*?urls = \[\s*"([^"]*)"',
        (root / "WORKSPACE").read_text("utf-8"),
        re.S,
    )
    if archive is None:
        raise ReleaseError("WORKSPACE has no archive of Gloo")
    # Horovod 0.28.1 has this commit as its submodule.
    commit = "d96897b339a07087f588223ca216e75f64e3ca58"
    gloo = {
        "type": "library",
        "bom-ref": "gloo",
        "name": "Gloo",
        "version": f"0.5.0+{commit[:7]}",
        "purl": f"pkg:github/facebookincubator/gloo@{commit}",
        "licenses": [{"license": {"id": "BSD-3-Clause"}}],
        "pedigree": {"notes": "Patched by bazel/gloo.patch of the source distribution."},
        "externalReferences": [
            {"type": "vcs", "url": "https://github.com/facebookincubator/gloo"},
            {
                "type": "distribution",
                "url": archive[2],
                "hashes": [{"alg": "SHA-256", "content": archive[1]}],
            },
        ],
    }
    cuda = {
        "type": "library",
        "bom-ref": "cuda-runtime",
        "name": "CUDA Runtime",
        "supplier": {"name": "NVIDIA"},
        "licenses": [{"license": {"name": "NVIDIA CUDA Toolkit End User License Agreement"}}],
    }
    named = re.findall(r"^## (.*)$", (root / NOTICES).read_text("utf-8"), re.M)
    if sorted(named) != sorted(str(part["name"]) for part in (gloo, cuda)):
        raise ReleaseError(f"{NOTICES} names {named}: tools/release.py describes others")
    return [gloo, cuda] if device_code else [gloo]


def with_parts(bom: dict[str, Any], version: str, parts: Sequence[dict[str, Any]]) -> None:
    """Adds the version, and parts that are no Python packages, to a list of Python packages."""
    package = bom["metadata"]["component"]
    package["version"] = version
    package["purl"] = f"pkg:pypi/tf-dynemb@{version}"
    bom["components"] = [*parts, *bom["components"]]
    names = [part["bom-ref"] for part in parts]
    for each in bom["dependencies"]:
        if each["ref"] == package["bom-ref"]:
            each["dependsOn"] = sorted([*each.get("dependsOn", []), *names])
    bom["dependencies"] += [{"ref": name} for name in names]


# Processes.


def environment(**more: str) -> dict[str, str]:
    """The environment without what make and a developer's shell add."""
    dropped = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH", "VERSION", "ARGS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": "3", **more}


def run(*command: object, folder: Path, **more: str) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, cwd=folder, env=environment(**more)).returncode:
        raise ReleaseError(f"failed: {shlex.join(words)}")


def output(*command: object, folder: Path, shown: bool = False) -> str:
    """Returns what a command prints, and also shows it as it comes, if that is wanted."""
    words = [str(word) for word in command]
    lines = []
    with subprocess.Popen(
        words, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if shown:
                print(line, end="", flush=True)
    if process.returncode:
        raise ReleaseError(f"failed: {shlex.join(words)}\n{''.join(lines[-20:])}".strip())
    return "".join(lines)


def git(*words: object, folder: Path) -> str:
    return output("git", *words, folder=folder).strip()


# What a release does. The first line of a docstring is printed when the step begins.


def check(release: Release) -> None:
    """Raises ReleaseError if the checkout is not ready for this release."""
    root = release.root
    branch = git("branch", "--show-current", folder=root)
    if branch != release.branch:
        raise ReleaseError(
            f"this is {f'the branch {branch}' if branch else 'no branch'}, and releases are made "
            f'from {release.branch} (another one: ARGS="--branch NAME")'
        )
    changed = git("status", "--porcelain", folder=root)
    if changed:
        raise ReleaseError(f"the checkout has changes that are not committed:\n{changed}")
    check_version(release.version, version_of((root / VERSION).read_text("utf-8")))
    if git("tag", "--list", release.tag, folder=root):
        raise ReleaseError(f"there is a tag {release.tag} already")
    closed((root / CHANGELOG).read_text("utf-8"), release.version, datetime.date.today())
    linked_parts(root, device_code=True)


def prepare(release: Release) -> None:
    """A clone, with the changelog closed, the version set, a commit and a tag."""
    clone, version = release.clone, release.version
    if release.place.exists():
        shutil.rmtree(release.place)
    release.place.mkdir(parents=True)
    git("clone", "-q", "--branch", release.branch, release.root, clone, folder=release.root)
    # `make wheels` keeps an environment for each TensorFlow, and what it has compiled.
    wheels = release.root / "build" / "wheels"
    wheels.mkdir(exist_ok=True)
    (clone / "build").mkdir()
    (clone / "build" / "wheels").symlink_to(wheels)
    # Who commits, and with which key.
    for setting in git("config", "--list", "-z", folder=release.root).split("\0"):
        name, _, value = setting.partition("\n")
        if re.match(r"(user|gpg)\.|(commit|tag)\.gpgsign$", name):
            git("config", name, value, folder=clone)

    changelog = closed((clone / CHANGELOG).read_text("utf-8"), version, datetime.date.today())
    (clone / CHANGELOG).write_text(changelog, "utf-8")
    release.notes.write_text(notes_of(changelog, version), "utf-8")
    for name, line, text in (
        (VERSION, "__version__ = ", f'"{version}"'),
        (CITATION, "version: ", version),
    ):
        path = clone / name
        path.write_text(with_version(path.read_text("utf-8"), text, line), "utf-8")
    git("commit", "-q", "-a", "-m", f"Version {version}", folder=clone)
    git("tag", "-a", release.tag, "-m", f"tf_dynemb {version}", folder=clone)


def build_wheel(release: Release) -> None:
    """The wheel for upload: make wheels."""
    run("make", "wheels", folder=release.clone)


def build_sdist(release: Release) -> None:
    """The source distribution."""
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    # It prints hundreds of names.
    output(*command, "--outdir", release.dist, release.clone, folder=release.place)


def check_metadata(release: Release) -> None:
    """What the index refuses: twine check."""
    files = [release.one("*.whl"), release.one("*.tar.gz")]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, folder=release.place)


def check_platform(release: Release) -> None:
    """The systems on which the wheel runs: auditwheel show."""
    wheel = release.one("*.whl")
    auditwheel = release.clone / "build" / "wheels" / "tools" / "bin" / "auditwheel"
    shown = json.loads(output(auditwheel, "show", "--json", wheel, folder=release.place))
    faults = platform_faults(shown, wheel.name)
    if faults:
        raise ReleaseError(f"{wheel.name} breaks the promise of {PLATFORM}: {'; '.join(faults)}")
    print(f"symbols of {shown['sym_tag']}; from elsewhere: {', '.join(shown['external_libs'])}")


def try_wheel(release: Release) -> None:
    """The quickstart from the wheel, with each Python and TensorFlow: make test-wheels."""
    table = output("make", "-s", "test-wheels", folder=release.clone, shown=True)
    release.pairs.write_text(table, "utf-8")
    if not pairs_of(table)[0]:
        raise ReleaseError("the quickstart ran with no Python and no TensorFlow")


def try_sdist(release: Release) -> None:
    """A build from the source distribution, and a table."""
    # Not pip's temporary folder, for which Bazel would keep what it builds for ever.
    source = release.place / "source"
    source.mkdir()
    run("tar", "-xzf", release.one("*.tar.gz"), "--strip-components=1", folder=source)
    run(sys.executable, "-m", "venv", "--without-pip", release.tried, folder=release.place)
    flags = os.environ.get("DYNEMB_BAZEL_FLAGS", "")
    cache = f"--disk_cache={release.root / 'build' / 'wheels' / 'cache'}"
    pip = [sys.executable, "-m", "pip", "--python", release.tried, "install", "-q"]
    run(*pip, f"{source}[cpu]", folder=release.place, DYNEMB_BAZEL_FLAGS=f"{flags} {cache}")
    use = (
        "import tf_dynemb as de; de.DynamicVariable(2, name='t').lookup([1]); print(de.__version__)"
    )
    printed = output(release.tried / "bin" / "python", "-c", use, folder=release.place)
    if printed.split()[-1:] != [release.version]:
        raise ReleaseError(f"the source distribution has the version {printed.strip()!r}")


def write_bom(release: Release) -> None:
    """What the wheel contains and needs: CycloneDX."""
    # Of the tools: the tests of this module do without them.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    command = [sys.executable, "-m", "cyclonedx_py", "environment", release.tried]
    command += ["--pyproject", release.clone / "pyproject.toml", "--mc-type", "library"]
    command += ["--spec-version", "1.6"]
    bom = json.loads(output(*command, folder=release.place))
    parts = linked_parts(release.clone, bool(library.kernels_of(release.one("*.whl"))))
    with_parts(bom, release.version, parts)
    text = json.dumps(bom, indent=2) + "\n"
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if fault is not None:
        raise ReleaseError(f"the list of parts is not CycloneDX: {fault}")
    (release.dist / f"tf_dynemb-{release.version}.cdx.json").write_text(text, "utf-8")


def write_sums(release: Release) -> None:
    """SHA256SUMS."""
    (release.dist / "SHA256SUMS").write_text(sums(release.dist.iterdir()), "utf-8")


def take_over(release: Release) -> None:
    """The commit, the tag and dist/ in the checkout."""
    root, tag = release.root, release.tag
    dist, earlier = root / "dist", release.place / "earlier_dist"
    with contextlib.ExitStack() as undo:
        if dist.exists():
            dist.rename(earlier)
            undo.callback(earlier.rename, dist)
        release.dist.rename(dist)
        undo.callback(dist.rename, release.dist)
        git("fetch", "-q", release.clone, f"refs/tags/{tag}:refs/tags/{tag}", folder=root)
        undo.callback(git, "tag", "-d", tag, folder=root)
        if git("branch", "--show-current", folder=root) != release.branch:
            raise ReleaseError(f"the checkout has left {release.branch} since the release began")
        git("merge", "-q", "--ff-only", f"{tag}^{{commit}}", folder=root)
        undo.pop_all()


Step = Callable[[Release], None]
STEPS: tuple[Step, ...] = (
    prepare,
    build_wheel,
    build_sdist,
    check_metadata,
    check_platform,
    try_wheel,
    try_sdist,
    write_bom,
    write_sums,
)


def summary(release: Release, dist: Path) -> list[str]:
    """Returns lines about the files, and about what was not tried."""
    lines = []
    for path in sorted(dist.iterdir()):
        kind = f", {library.device_code(path)}" if path.suffix == ".whl" else ""
        lines.append(f"  {path.name}, {path.stat().st_size:,} bytes{kind}")
    left = pairs_of(release.pairs.read_text("utf-8"))[1] if release.pairs.exists() else []
    if left:
        lines += [f"not tried, because this machine lacks the Python: {', '.join(left)}"]
    return lines


def left_to_do(release: Release) -> list[str]:
    """Returns lines with the commands that publish the release."""
    tag, notes = release.tag, release.notes.relative_to(release.root)
    return [
        "release: nothing is published yet. Next:",
        f"  git push --atomic origin {release.branch} {tag}",
        "  .venv/bin/python -m twine upload dist/*.whl dist/*.tar.gz",
        f"  gh release create {tag} dist/* --verify-tag --title 'tf_dynemb {release.version}' "
        f"--notes-file {notes}",
        f"(or take it back: git tag -d {tag} && git reset --keep HEAD~1)",
    ]


def make(release: Release, dry_run: bool, steps: Sequence[Step]) -> None:
    """Makes a release, or with `dry_run` leaves it in the clone."""
    check(release)
    steps = steps if dry_run else [*steps, take_over]
    for i, step in enumerate(steps):
        title = (step.__doc__ or "").partition("\n")[0].rstrip(".")
        print(f"release: {i + 1} of {len(steps)}, {title}", flush=True)
        step(release)
    dist = release.dist if dry_run else release.root / "dist"
    print(f"release: tf_dynemb {release.version}, in {dist.relative_to(release.root)}:")
    print("\n".join(summary(release, dist)))
    if dry_run:
        print(
            f"release: a dry run, so the checkout is unchanged; "
            f"{release.notes.relative_to(release.root)} has the text for the release"
        )
    else:
        print("\n".join(left_to_do(release)))


def main(
    arguments: Sequence[str] | None = None, root: Path = ROOT, steps: Sequence[Step] = STEPS
) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="the new version, such as 0.2.0")
    parser.add_argument("--branch", default="main", help="the branch to release from, if not main")
    parser.add_argument("--dry-run", action="store_true", help="leaves the checkout unchanged")
    given = parser.parse_args(arguments)
    try:
        make(Release(root, given.version, given.branch), given.dry_run, steps)
    except (ReleaseError, OSError) as error:
        print(f"release: stopped, and the checkout is unchanged: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
