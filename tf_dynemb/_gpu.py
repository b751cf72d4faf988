"""Which operator library fits the NVIDIA driver of this machine.

A wheel has two libraries for each TensorFlow. The device code of one is compiled by CUDA 13, and
needs a driver for CUDA 13 (580 or newer). That of the other, `..._cuda12.so`, is compiled for CUDA
12.9, and needs a driver for CUDA 12 (525 or newer). Without a driver both work alike.
"""

from __future__ import annotations

import ctypes
import pathlib

from tf_dynemb._presence import exists

SUFFIX = "_cuda12"


def driver_version() -> int | None:
    """Returns the newest CUDA version that the driver supports, such as 12040; None without one.

    Does not start the driver, so a process may fork afterwards.
    """
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # there is none, or it is damaged
        return None
    return None if failed else version.value


def choose(library: pathlib.Path, driver: int | None) -> tuple[pathlib.Path, str]:
    """Returns the one of the libraries for a TensorFlow that fits a driver, and the reason.

    Args:
        library: the path of the library that is not for CUDA 12, whether or not it exists.
        driver: what `driver_version` returned.
    """
    other = library.with_name(f"{library.stem}{SUFFIX}.so")
    if driver is None:
        return library, "There is no NVIDIA driver: libcuda.so.1 was not found."
    says = f"The NVIDIA driver supports CUDA {version_text(driver)}"
    if driver // 1000 < 12:
        return library, f"{says}, and the operators need a driver for CUDA 12 or newer."
    if not exists(other):
        return library, f"{says}, and there is one library, {library.name}."
    if driver // 1000 == 12:
        return other, f"{says}; {library.name} would need a driver for CUDA 13."
    return library, f"{says}; {other.name} is for drivers of CUDA 12."


def version_text(version: int) -> str:
    """Returns "12.4" for 12040."""
    return f"{version // 1000}.{version % 1000 // 10}"
