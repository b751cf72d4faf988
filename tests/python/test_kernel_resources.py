"""tools/kernel_resources.py: which kernels exceed their budgets."""

import importlib.util
import pathlib

import pytest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "kernel_resources.py"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="no sources: this tests a wheel")

SPACE = "N6dynemb20internal_cuda_device"
ADAGRAD = f"_Z{SPACE}10RowsKernelILj%dENS_6device14ApplyGradientsINS_8formulas7AdagradEEEEEvmT0_"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("kernel_resources", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel(name, registers, stack=0, stores=0, architecture="sm_90"):
    return (
        f"ptxas info    : Compiling entry function '{name}' for '{architecture}'\n"
        f"ptxas info    : Function properties for {name}\n"
        f"    {stack} bytes stack frame, {stores} bytes spill stores, {stores} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 0 barriers\n"
        "ptxas info    : Compile time = 1.5 ms\n"
    )


def test_kernels_are_named_by_their_bodies(tool):
    # The second has wider teams; the others are of an architecture that has no budgets, and of CUB.
    report = kernel(ADAGRAD % 4, 60, stack=8) + kernel(ADAGRAD % 32, 70, stores=4)
    report += kernel(ADAGRAD % 8, 99, architecture="sm_80") + kernel("_ZN3cub4ScanEv", 128, 64)
    assert tool.kernels(report) == {"ApplyGradients<Adagrad>": (70, 8, 8)}


def test_every_kernel_is_understood(tool):
    report = kernel(ADAGRAD % 4, 60) + kernel(ADAGRAD % 8, 60).replace("spill loads", "spills")
    with pytest.raises(ValueError, match="of 2 kernels, 1 were understood"):
        tool.kernels(report)


def test_excesses(tool, monkeypatch):
    monkeypatch.setattr(tool, "BUDGETS", {"A": tool.Use(80, stack=8), "B": tool.Use(32)})
    within = {"A": tool.Use(80, 8), "B": tool.Use(32), "C": tool.Use(64)}
    assert tool.excesses(within) == []
    for more, what in (
        ({"A": tool.Use(81, 8)}, "A: "),
        ({"A": tool.Use(80, 16)}, "A: "),
        ({"B": tool.Use(30, spilled=4)}, "B: "),
        ({"C": tool.Use(65)}, "C: "),
        ({"D": tool.Use(20, stack=8)}, "D: "),
    ):
        (line,) = tool.excesses({**within, **more})
        assert line.startswith(what)
    assert tool.excesses({"A": tool.Use(1)}) == ["B: no such kernel"]


def test_reports(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "BUDGETS", {})
    report = tmp_path / "kernels.ptxas"
    missing = str(tmp_path / "*.ptxas")
    assert tool.main([missing]) == 0
    assert "nvcc compiled nothing" in capsys.readouterr().out
    report.write_text(f"compiled by {tool.NVCC}88\n" + kernel(ADAGRAD % 4, 64))
    assert tool.main([str(report), missing]) == 0
    assert "1 kernels are within" in capsys.readouterr().out
    report.write_text(f"compiled by {tool.NVCC}88\n" + kernel(ADAGRAD % 4, 65))
    assert tool.main([str(report)]) == 1
    assert capsys.readouterr().out.startswith("ApplyGradients<Adagrad>: Use(registers=65")
    # With another nvcc, the numbers are no failures.
    report.write_text("compiled by nvcc V12.4.99\n" + kernel(ADAGRAD % 4, 65))
    assert tool.main([str(report)]) == 0
    assert "registers=65" in capsys.readouterr().out
