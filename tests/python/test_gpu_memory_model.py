"""The accesses of GPU code to buckets: words of 32 bits, and nothing else.

PTX's memory model does not define the result if threads access one address with different sizes. A
digest has 8 bits, so C++ that looks right can break this rule; the PTX shows it.
"""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
pytestmark = [
    pytest.mark.skipif(not (ROOT / "cc").is_dir(), reason="no sources: this tests a wheel"),
    pytest.mark.skipif(NVCC is None, reason="no nvcc"),
]

# An instruction that accesses memory, its qualifiers, and the type at the end of these.
ACCESS = re.compile(r"^\s*(?:@!?%p\d+ )?((?:ld|st|atom|red)\.[a-z0-9._:]+)\s", re.MULTILINE)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The accesses of each kernel to memory that threads share."""
    ptx = tmp_path_factory.mktemp("ptx") / "bucket_access.ptx"
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "--fmad=false", "-arch=sm_90", "-I."]
    source = "tests/cuda/bucket_access.cu"
    subprocess.run([NVCC, *flags, "-ptx", source, "-o", ptx], cwd=ROOT, check=True, timeout=300)
    _, *entries = re.split(r"\.visible \.entry |\.weak \.entry ", ptx.read_text())
    return {
        text.partition("(")[0]: [a for a in ACCESS.findall(text) if ".param" not in a]
        for text in entries
    }


def test_accesses_are_words(kernels):
    assert len(kernels) == 3
    for name, accesses in kernels.items():
        assert len(accesses) > 20, name
        sizes = {access.rpartition(".")[2] for access in accesses}
        assert sizes <= {"u32", "b32"}, (name, sorted(set(accesses)))


def test_a_thread_reads_a_head_at_once(kernels):
    (accesses,) = (found for name, found in kernels.items() if "ByThreads" in name)
    assert "ld.relaxed.gpu.v2.u32" in accesses
