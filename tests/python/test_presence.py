"""Only ENOENT and ENOTDIR mean that something is absent; other errors reach the caller."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import pathlib
import shutil

import pytest
from storage_helpers import publish, publish_chain

import tf_dynemb
from tf_dynemb import _presence
from tf_dynemb.cli import main
from tf_dynemb.persistence import shared_path
from tf_dynemb.saved_models import checksums, export
from tf_dynemb.storage import Chain, Publication
from tf_dynemb.tfra import kv_files

PACKAGE = pathlib.Path(tf_dynemb.__file__).parent
ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES)


@pytest.fixture
def fail(monkeypatch):
    """Lets a function of `os` fail for the paths that end with a text."""

    def let_fail(name, ending, number):
        whole = getattr(os, name)

        def call(path, *arguments, **more):
            if str(path).endswith(str(ending)):
                raise OSError(number, os.strerror(number), str(path))
            return whole(path, *arguments, **more)

        monkeypatch.setattr(os, name, call)

    return let_fail


def test_what_is_there(tmp_path):
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    link.symlink_to("nothing")
    functions = (_presence.exists, _presence.is_directory, _presence.is_file)
    assert [function(tmp_path) for function in functions] == [True, True, False]
    assert [function(file) for function in functions] == [True, False, True]
    for absent in (tmp_path / "none", file / "below", link):
        assert [function(absent) for function in functions] == [False] * 3
    assert _presence.exists(link, follow=False)
    assert not _presence.exists(tmp_path / "none", follow=False)


@pytest.mark.parametrize("number", ERRORS)
def test_no_answer(tmp_path, fail, number):
    fail("stat", tmp_path, number)
    for function in (_presence.exists, _presence.is_directory, _presence.is_file):
        with pytest.raises(OSError, match=tmp_path.name) as raised:
            function(tmp_path)
        assert raised.value.errno == number


@pytest.mark.parametrize("number", ERRORS)
class TestNoAnswer:
    """The behavior of callers if the file system does not answer."""

    def test_a_chain(self, tmp_path, fail, number):
        directory = publish(tmp_path).directory
        fail("stat", directory / "MANIFEST.json", number)
        with pytest.raises(OSError, match="MANIFEST") as raised:
            Chain.open(directory)
        assert raised.value.errno == number

    def test_a_file_that_a_command_would_replace(self, tmp_path, fail, number):
        publish(tmp_path / "chain")
        output = tmp_path / "rows.npz"
        output.write_text("precious")
        fail("stat", output, number)
        assert main(["export", str(tmp_path / "chain"), str(output)]) != 0
        assert output.read_text() == "precious"

    def test_a_folder_that_an_export_would_replace(self, tmp_path, fail, number):
        path = tmp_path / "folder"
        path.mkdir()
        fail("stat", path, number)
        with pytest.raises(OSError, match="folder"):
            export._check_free(path)

    def test_a_file_that_checksums_would_leave_out(self, tmp_path, fail, number):
        (tmp_path / "saved_model.pb").touch()
        fail("stat", "saved_model.pb", number)
        with pytest.raises(OSError, match=r"saved_model\.pb"):
            checksums.write(tmp_path)

    def test_files_of_tfra(self, tmp_path, fail, number):
        assert kv_files.names_in(str(tmp_path / "none")) == []
        fail("listdir", tmp_path, number)
        with pytest.raises(OSError, match=tmp_path.name):
            kv_files.names_in(str(tmp_path))

    def test_a_lock(self, tmp_path, monkeypatch, number):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(OSError, match=os.strerror(number)), Publication(tmp_path, "base"):
            pass

    def test_a_folder_of_another_rank(self, tmp_path, monkeypatch, number):
        """A stale handle becomes valid again; if it does not, the error says so."""
        monkeypatch.setattr(shared_path, "_PATIENCE", 0.2)
        whole, calls = os.stat, []

        def stat(path, *arguments, **more):
            if str(path) == str(tmp_path):
                calls.append(path)
                if len(calls) < 3:
                    raise OSError(number, os.strerror(number), str(path))
            return whole(path, *arguments, **more)

        monkeypatch.setattr(os, "stat", stat)
        shared_path.wait_for(tmp_path, 1)
        assert len(calls) == 3


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert publish(tmp_path).manifest.kind == "base"


def test_snapshots_that_cannot_be_removed(tmp_path, monkeypatch):
    """The base that supersedes them is published; a warning names them."""
    publish_chain(tmp_path)

    def rmtree(path, *_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.warns(UserWarning, match=r"-delta-.*cannot be removed"):
        base = publish(tmp_path)
    assert Chain.open(tmp_path).last.manifest.id == base.manifest.id


# Calls that take an error for an answer, and the modules that may make them: where nothing is read,
# replaced or removed because of it.
CALLS = {"exists", "lexists", "isfile", "isdir", "is_file", "is_dir", "glob", "rglob", "iglob"}
MAY_CALL = {
    "_ops.py",  # for the text of an error
    "saved_models/checksums.py",  # rglob of files that this process has just written
    "saved_models/writing.py",  # the same
}


def test_no_module_takes_an_error_for_an_answer():
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in CALLS and name not in MAY_CALL:
                found[f"{name}:{node.lineno}"] = node.func.attr
            ignores = any(word.arg == "ignore_errors" for word in node.keywords)
            # served.py: a temporary folder, which the process removes when it ends.
            if ignores and name != "variables/served.py":
                found[f"{name}:{node.lineno}"] = "ignore_errors"
    assert found == {}
