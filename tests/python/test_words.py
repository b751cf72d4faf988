"""The words of CONTRIBUTING.md, "Words to avoid", that no source or document contains."""

import ast
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
IN_CHECKOUT = (ROOT / "cc").is_dir() and (ROOT / "tf_dynemb").is_dir()

in_checkout = pytest.mark.skipif(not IN_CHECKOUT, reason="no sources: this tests a wheel")

TOPS = ("bazel", "benchmarks", "cc", "docs", "examples", "tests", "tf_dynemb", "tools")
SUFFIXES = {".bzl", ".c", ".cc", ".cu", ".cuh", ".d2", ".h", ".md", ".py", ".sh"}
DATA = {"golden", "results", "__pycache__"}
EXCEPT = {pathlib.Path(__file__).resolve()}
THE_WORDS = "\n## Words to avoid\n"  # the last section of CONTRIBUTING.md, which has them

# Searched everywhere: in comments, documents and messages. A space is also the end of a line.
PHRASES = (
    "but for(?! the first time)",
    "or else",
    "whoever",
    "for (itself|themselves)",
    "[a-z]+ anew",
    "for want of",
    "so many",
    "some [0-9]+",
    "(stand|stands|stood|standing) for",
    "(go|goes|going|gone) by",
    "of (its|their|our|his) own",
)
PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})\b".replace(" ", r"\s+"), re.IGNORECASE)
# Searched in comments, docstrings and documents only: in code, % is an operator.
PERCENT = re.compile(r"\d %(?!\s*[\d(])")

# The end of a line, with the quotes of a message and the marks of a comment around it.
LINE_END = re.compile(r"""["']?[ \t]*\n[ \t]*(//+|\#+|>|f?["'](?!["']))?""")


def files() -> list[pathlib.Path]:
    found = [
        path
        for top in TOPS
        for path in (ROOT / top).rglob("*")
        if path.suffix in SUFFIXES and path.is_file() and not DATA & set(path.parts)
    ]
    return sorted({*ROOT.glob("*.md"), *found} - EXCEPT)


def joined(text: str) -> str:
    """Returns a text of the same length in which a line goes on in the next one."""
    return LINE_END.sub(lambda end: " " * len(end[0]), text)


def prose(text: str, suffix: str) -> str:
    """Returns the comments and documents of a file. Each has the line that it has in the file."""
    if suffix == ".md":
        return re.sub(r"`[^`]*`", lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    lines = [""] * (text.count("\n") + 1)
    if suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0] - 1] = token.string
        for node in ast.walk(ast.parse(text)):
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, documented) and ast.get_docstring(node) is not None:
                for i, line in enumerate(ast.get_docstring(node, clean=False).split("\n")):
                    lines[node.body[0].lineno - 1 + i] = line
    else:
        mark = "//" if suffix in {".c", ".cc", ".cu", ".cuh", ".h"} else "#"
        for i, line in enumerate(text.split("\n")):
            lines[i] = line.partition(mark)[2]
    return "\n".join(lines)


def faults(text: str, suffix: str) -> list[tuple[int, str]]:
    """Returns the line and the text of each phrase to avoid."""
    comments = prose(text, suffix)
    found = [(text, match) for match in PHRASE.finditer(joined(text))]
    found += [(comments, match) for match in PERCENT.finditer(comments)]
    return [
        (where.count("\n", 0, match.start()) + 1, " ".join(match[0].split()))
        for where, match in found
    ]


@in_checkout
def test_sources_and_documents_avoid_the_words():
    paths = files()
    assert len(paths) > 700
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase!r}"
        for path in paths
        for line, phrase in faults(
            path.read_text(encoding="utf-8").partition(THE_WORDS)[0], path.suffix
        )
    ]
    assert not found, "CONTRIBUTING.md, 'Words to avoid', has better ones:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        (".h", "int a;\n// All rows, but\n// for the first.\n", [(2, "but for")]),
        (".cc", 'Fail("the table has room, or "\n     "else it evicts");\n', [(1, "or else")]),
        (".cu", "// Takes 5 % of the time.\nint b = 5 % a;\n", [(1, "5 %")]),
        (".py", "def f():\n    '''Takes\n\n    5 % of it.'''\n    return 5 % a\n", [(4, "5 %")]),
        (".py", "a = 5 % b  # 7 % more\n", [(1, "7 %")]),
        (".py", 'raise ValueError("built "\n    f"anew")\n', [(1, "built anew")]),
        (".md", "Rows\nof its own, `5 % a`, 5 % of it\n", [(2, "of its own"), (2, "5 %")]),
        (".md", "Whoever reads\nsome 200 of these.\n", [(1, "Whoever"), (2, "some 200")]),
        (".sh", "echo $((5 % 2)) # 5 % 2\n", []),
    ],
)
def test_phrases_are_found(suffix, text, expected):
    assert faults(text, suffix) == expected
