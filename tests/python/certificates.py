"""Certificates of ranks for tests, which the command `openssl` makes. None is in the repository."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


class Authority:
    """An authority, with its files in a new folder; the test is skipped without `openssl`."""

    def __init__(self, folder: pathlib.Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no command `openssl` that makes certificates")
        folder.mkdir()
        self._folder = folder
        self.certificate = str(folder / "ca.pem")
        made = ("-days", "2", "-subj", f"/CN={name}", "-keyout", "ca.key", "-out", "ca.pem")
        self._run("req", "-x509", "-nodes", *KEY, *made)

    def rank(self, days: int = 2, password: str | None = None) -> tuple[str, str, str]:
        """Returns the three files of a rank; its certificate is valid for `days` days from now."""
        name = f"rank{days}{password or ''}"
        key, request, certificate = (f"{name}.{ending}" for ending in ("key", "csr", "pem"))
        if not (self._folder / certificate).exists():
            protect = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
            made = ("-subj", "/CN=rank", "-keyout", key, "-out", request)
            self._run("req", *protect, *KEY, *made)
            signed = ("-in", request, "-days", str(days), "-out", certificate)
            if password is None:
                by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
                self._run("x509", "-req", *by, *signed)
            else:
                shutil.copy(self._folder / "ca.pem", self._folder / certificate)
        return str(self._folder / certificate), str(self._folder / key), self.certificate

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            ["openssl", *arguments], cwd=self._folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def variables(files: tuple[str, str, str]) -> dict[str, str]:
    """Returns the environment variables that name the files of a rank."""
    names = ("CERTIFICATE", "KEY", "CA")
    return {f"TF_DYNEMB_RANKS_TLS_{name}": file for name, file in zip(names, files, strict=True)}
