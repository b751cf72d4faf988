"""Builds the site, build/site, from the documents of the repository: `make docs`.

Documents link to each other, and to other files, by paths that also work in a checkout. So they are
assembled first, in build/site_sources: README.md becomes the first page, docs/ is beside it, and
what they link to elsewhere is below source/. Documents among that are pages as well, and their
links are followed. A link to a folder leads to its README.md, or becomes text if it has none. A
link whose text is the name of a document gets the document's title.

`--check` works in a temporary folder, and keeps nothing. A warning of Sphinx is an error.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = "README.md"
_CODE = re.compile(r"^(```.*?^```)", re.M | re.S)
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


def target_of(document: str, link: str) -> str | None:
    """Returns the path in the repository that a link of a document leads to.

    None: it leads elsewhere, or is no link but code. "": it leads to a folder without a README.md.
    """
    if _ELSEWHERE.match(link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), link.partition("#")[0]))
    if not (ROOT / path).exists():
        return None
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
        return path if (ROOT / path).is_file() else ""
    return path


def page_of(path: str) -> str:
    """Returns where a file of the repository is in the site's sources."""
    if path == FIRST:
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def assembled(document: str) -> tuple[str, set[str]]:
    """Returns the text of a document for the site, and the files of the repository it links to."""
    found: set[str] = set()

    def replace(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        target = target_of(document, link)
        if target is None:
            return match[0]
        if not target:
            return label
        found.add(target)
        name = posixpath.basename(target)
        if not mark and name.endswith(".md") and posixpath.basename(label) == name:
            label = ""  # the title of the page, which Sphinx puts in
        to = posixpath.relpath(page_of(target), posixpath.dirname(page_of(document)) or ".")
        _, hash_, anchor = link.partition("#")
        return f"{mark}[{label}]({to}{hash_}{anchor})"

    parts = _CODE.split((ROOT / document).read_text())
    text = "".join(each if each.startswith("```") else _LINK.sub(replace, each) for each in parts)
    return text, found


def assemble(folder: Path) -> None:
    """Writes the site's sources."""
    docs = ROOT / "docs"
    contents = (docs / "contents.txt").read_text()
    waiting = [FIRST, "CHANGELOG.md", "CODE_OF_CONDUCT.md"]
    waiting += [f"docs/{each.relative_to(docs)}" for each in sorted(docs.rglob("*.*"))]
    known = set(waiting)
    while waiting:
        path = waiting.pop()
        place = folder / page_of(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not path.endswith(".md"):
            shutil.copyfile(ROOT / path, place)
            continue
        text, links = assembled(path)
        if path == FIRST:
            text += contents
        elif path == "docs/api/command_line.md":
            text += command_lines()
        elif f"<{page_of(path).removesuffix('.md')}>" not in contents:
            text = f"---\norphan: true\n---\n{text}"
        place.write_text(text)
        waiting += links - known
        known |= links


def command_lines() -> str:
    """Returns what the commands print with --help, each below a heading."""
    environment = {**os.environ, "COLUMNS": "86"}
    text = ""
    commands = [["tf_dynemb"], ["tf_dynemb.serve"]]
    while commands:
        command = commands.pop(0)
        run = [sys.executable, "-m", *command, "--help"]
        printed = subprocess.run(
            run, check=True, capture_output=True, text=True, env=environment
        ).stdout
        title = "python -m tf_dynemb.serve" if command[0] != "tf_dynemb" else "tf-dynemb"
        text += f"\n## {' '.join([title, *command[1:]])}\n\n```text\n{printed}```\n"
        if command == ["tf_dynemb"]:
            names = re.findall(r"^    ([a-z]+)  ", printed, re.M)
            commands[:0] = [["tf_dynemb", name] for name in names]
    return text


def build(folder: Path) -> int:
    """Builds the site in a folder, and its sources beside it; returns Sphinx's exit code."""
    from sphinx.cmd.build import main as sphinx

    sources = folder.with_name("site_sources")
    shutil.rmtree(sources, ignore_errors=True)
    assemble(sources)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    return int(sphinx(["-W", "--keep-going", "-q", "-b", "html", str(sources), str(folder)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="keep nothing")
    options = parser.parse_args()
    if options.check:
        with tempfile.TemporaryDirectory() as folder:
            return build(Path(folder) / "site")
    code = build(ROOT / "build" / "site")
    if not code:
        print("the site begins at build/site/index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
