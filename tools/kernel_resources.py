"""Compares the registers, stack and spills of each kernel, as ptxas reports them, with budgets.

    python tools/kernel_resources.py REPORT...

A REPORT is the version of nvcc, and what `ptxas -v` prints; Bazel keeps one beside each object of a
.cu file. The budgets hold for ARCHITECTURE and NVCC. With another nvcc, kernels are only listed.
Fails if a kernel uses more than its budget, or if a budget is for no kernel.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

NVCC = "nvcc V13.0."
ARCHITECTURE = "sm_90"


class Use(NamedTuple):
    """The resources of a kernel: a thread's registers, bytes of local memory, and bytes spilled."""

    registers: int
    stack: int = 0
    spilled: int = 0


# A stack or a spill is a detour through memory: it has to be listed here.
DEFAULT = Use(64)
BUDGETS = {
    # The kernels of a step. 64 registers let 32 warps share a multiprocessor, 80 registers 24, and
    # 96 20. SGD, Adagrad and Adam were measured like this (benchmarks/log_gpu.md).
    "PoolBags<TableVectors>": Use(96, stack=24, spilled=80),
    "PoolBags<IndexedVectors>": Use(72, stack=32, spilled=120),
    "PoolBags<ServedVectors>": Use(96, stack=16, spilled=56),
    "SumSegments<KeySums, true>": Use(80, stack=8, spilled=12),
    "SumSegments<KeySums, false>": Use(96),
    "SumSegments<RowSums, true>": Use(80),
    "SumSegments<RowSums, false>": Use(80, stack=40, spilled=118),
    "ApplyGradients<Sgd>": Use(80),
    "ApplyGradients<SgdMomentum<false>>": Use(76),
    "ApplyGradients<SgdMomentum<true>>": Use(80),
    "ApplyGradients<RowwiseAdagrad>": Use(79),
    "ApplyGradients<Lion>": Use(76),
    "ApplyGradients<Adagrad>": Use(88),
    "ApplyGradients<Adam<false>>": Use(94),
    "ApplyGradients<Adam<true>>": Use(96),
    "ApplyGradients<Adamax>": Use(94),
    "ApplyGradients<Adadelta>": Use(94),
    "ApplyGradients<Ftrl<false>>": Use(96),
    "ApplyGradients<Ftrl<true>>": Use(94),
    "ApplyGradients<Rmsprop<false, false>>": Use(80, stack=16, spilled=44),
    "ApplyGradients<Rmsprop<false, true>>": Use(94),
    "ApplyGradients<Rmsprop<true, false>>": Use(92),
    "ApplyGradients<Rmsprop<true, true>>": Use(96),
    "FindKeys": Use(40),
    "ClaimSlots": Use(32),
    "EvictSlots": Use(40),
    "FillRows<FillInitial>": Use(45),
    # The kernels of served tables.
    "FindServed": Use(32, stack=8, spilled=8),
    "LoadServed": Use(32, stack=8, spilled=8),
    # The kernels for rows that change tiers.
    "PairUp": Use(32, stack=8, spilled=8),
    "SwapRows": Use(62),
    "MoveRows": Use(48, stack=8, spilled=20),
    # The kernels of cuts and scans.
    "CopyRows": Use(32, stack=8, spilled=8),
    "FlagSelected": Use(32, stack=16),
    # The kernels for rows that make up for missed steps.
    "BringRows<Sgd>": Use(64, stack=16),
    "BringRows<SgdMomentum<false>>": Use(72, stack=16),
    "BringRows<SgdMomentum<true>>": Use(72, stack=16),
    "BringRows<RowwiseAdagrad>": Use(64, stack=16),
    "BringRows<Adagrad>": Use(80, stack=24, spilled=16),
    "BringRows<Adadelta>": Use(80, stack=16),
    "BringRows<Adam<false>>": Use(112, stack=16),
    "BringRows<Adam<true>>": Use(112, stack=16),
    "BringRows<Adamax>": Use(112, stack=16),
    "BringRows<Rmsprop<false, false>>": Use(80, stack=16),
    "BringRows<Rmsprop<false, true>>": Use(80, stack=16),
    "BringRows<Rmsprop<true, false>>": Use(80, stack=16),
    "BringRows<Rmsprop<true, true>>": Use(96, stack=16),
    "BringCopies<Sgd>": Use(48, stack=16),
    "BringCopies<SgdMomentum<false>>": Use(48, stack=16),
    "BringCopies<SgdMomentum<true>>": Use(48, stack=16),
    "BringCopies<RowwiseAdagrad>": Use(48, stack=16),
    "BringCopies<Adagrad>": Use(56, stack=16),
    "BringCopies<Adadelta>": Use(64, stack=16),
    "BringCopies<Adam<false>>": Use(80, stack=16),
    "BringCopies<Adam<true>>": Use(96, stack=16),
    "BringCopies<Adamax>": Use(80, stack=16),
    "BringCopies<Rmsprop<false, false>>": Use(56, stack=16),
    "BringCopies<Rmsprop<false, true>>": Use(64, stack=16),
    "BringCopies<Rmsprop<true, false>>": Use(64, stack=16),
    "BringCopies<Rmsprop<true, true>>": Use(80, stack=16),
}

# The use of sums that step rows (kernels_apply_pooled.h), by the formula.
_STEPPED = {
    "Adadelta": Use(122),
    "Adagrad": Use(108),
    "Adam<false>": Use(116),
    "Adam<true>": Use(122),
    "Adamax": Use(116),
    "Ftrl<false>": Use(118),
    "Ftrl<true>": Use(118),
    "Lion": Use(113, stack=24, spilled=64),
    "Rmsprop<false, false>": Use(108),
    "Rmsprop<false, true>": Use(116),
    "Rmsprop<true, false>": Use(118),
    "Rmsprop<true, true>": Use(122),
    "Sgd": Use(94),
    "SgdMomentum<false>": Use(106),
    "SgdMomentum<true>": Use(105),
}
BUDGETS |= {f"SumSegments<SteppedSums<{formula}>, true>": use for formula, use in _STEPPED.items()}
BUDGETS |= {f"AddChunks<SteppedSums<{formula}>>": Use(75) for formula in _STEPPED}

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'\n"
    r"(?:.*Function properties.*\n)?"
    r"\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers"
)


def short(name: str) -> str:
    """The body that a kernel runs, of its demangled name."""
    body = re.match(r"void dynemb::internal_cuda_device::\w+<(?:\d+u, )?(.*?) ?>\(", name)
    without = re.sub(r"dynemb::(?:device::|formulas::)?", "", body[1] if body else name)
    return without.replace(" >", ">")


def kernels(report: str) -> dict[str, Use]:
    """The resources that each of our kernels uses, with the teams with which it uses most."""
    found = [m for m in _KERNEL.finditer(report) if m["architecture"] == ARCHITECTURE]
    reported = len(re.findall(rf"Compiling entry function '\w+' for '{ARCHITECTURE}'", report))
    if len(found) != reported:
        raise ValueError(f"of {reported} kernels, {len(found)} were understood")
    names = subprocess.run(
        ["c++filt"],
        input="\n".join(m["name"] for m in found),
        text=True,
        capture_output=True,
        check=True,
    ).stdout.splitlines()
    used: dict[str, Use] = {}
    for match, name in zip(found, names, strict=True):
        if "dynemb::internal_cuda_device::" not in name:
            continue  # of a library
        use = Use(
            int(match["registers"]), int(match["stack"]), int(match["stores"]) + int(match["loads"])
        )
        other = used.get(short(name), Use(0))
        used[short(name)] = Use(*map(max, use, other))
    return used


def excesses(used: dict[str, Use]) -> list[str]:
    """A line for each kernel that exceeds its budget, and for each budget without a kernel."""
    lines = [
        f"{name}: {use}, but its budget is {budget}"
        for name, use in sorted(used.items())
        for budget in [BUDGETS.get(name, DEFAULT)]
        if any(has > most for has, most in zip(use, budget, strict=True))
    ]
    return lines + [f"{name}: no such kernel" for name in BUDGETS if name not in used]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", nargs="*", type=pathlib.Path, metavar="REPORT")
    options = parser.parse_args(arguments)
    reports = [path for path in options.reports if path.exists()]
    if not reports:
        print("kernel_resources: no reports; nvcc compiled nothing")
        return 0
    text = "".join(path.read_text() for path in reports)
    used = kernels(text)
    if not used:
        print(f"kernel_resources: nothing was compiled for {ARCHITECTURE}")
        return 0
    if NVCC not in text:
        for name, use in sorted(used.items()):
            print(f"{name}: {use}")
        return 0
    lines = excesses(used)
    print("\n".join(lines) or f"kernel_resources: {len(used)} kernels are within their budgets")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
