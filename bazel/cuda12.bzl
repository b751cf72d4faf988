"""@cuda12: the toolkit for device code that runs with drivers of CUDA 12 (docs/gpu.md).

nvcc 13 makes code that needs a driver for CUDA 13. NVIDIA's packages on PyPI have what else is needed: ptxas, headers and the
runtime library of CUDA 12.9, but no nvcc. Only targets whose names end in cuda12 use this repository, so nothing is downloaded for
others.
"""

# Each package, its checksum, and its folder that becomes a part of the toolkit's root.
_PACKAGES = [
    # ptxas, libdevice, and headers of the compiler.
    (
        "https://files.pythonhosted.org/packages/25/48/b54a06168a2190572a312bfe4ce443687773eb61367ced31e064953dd2f7/nvidia_cuda_nvcc_cu12-12.9.86-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
        "5d6a0d32fdc7ea39917c20065614ae93add6f577d840233237ff08e9a38f58f0",
        "nvidia/cuda_nvcc",
    ),
    # Headers, and the static runtime library.
    (
        "https://files.pythonhosted.org/packages/bc/46/a92db19b8309581092a3add7e6fceb4c301a3fd233969856a8cbf042cd3c/nvidia_cuda_runtime_cu12-12.9.79-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        "25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3",
        "nvidia/cuda_runtime",
    ),
    # CUB and libcu++.
    (
        "https://files.pythonhosted.org/packages/18/2a/d4cd8506d2044e082f8cd921be57392e6a9b5ccd3ffdf050362430a3d5d5/nvidia_cuda_cccl_cu12-12.9.27-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        "37869e17ce2e1ecec6eddf1927cca0f8c34e64fd848d40453df559091e2d7117",
        "nvidia/cuda_cccl",
    ),
]

_BUILD = """package(default_visibility = ["//visibility:public"])

filegroup(
    name = "toolkit",
    srcs = glob(["cuda/**"]),
)

cc_library(
    name = "headers",
    hdrs = glob(["cuda/include/*.h*", "cuda/include/crt/**"]),
    includes = ["cuda/include"],
)

# Linked statically, so that a library with kernels loads without CUDA and without a driver.
cc_library(
    name = "runtime",
    srcs = ["cuda/lib/libcudart_static.a"],
    linkopts = [
        "-lrt",
        "-ldl",
        "-lpthread",
    ],
    deps = [":headers"],
)
"""

def _cuda12_impl(ctx):
    for url, sha256, folder in _PACKAGES:
        ctx.download_and_extract(url, output = "cuda", sha256 = sha256, stripPrefix = folder, type = "zip")
    result = ctx.execute(["chmod", "+x", "cuda/bin/ptxas"])
    if result.return_code:
        fail("cuda12: %s" % result.stderr)
    ctx.delete("cuda/nvvm/lib64")
    ctx.file("cuda/include/curand_mtgp32_kernel.h", "// clang's headers include it; it is a part of cuRAND, which is not used.\n")
    ctx.file("BUILD", _BUILD)

cuda12_toolkit = repository_rule(
    implementation = _cuda12_impl,
    doc = "CUDA 12.9 from PyPI.",
)
