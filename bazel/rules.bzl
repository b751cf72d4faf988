"""How this project's own C++ and CUDA is compiled."""

load("@local_cuda//:defs.bzl", "NVCC")

# No -march: a wheel has to run on any x86-64; the code picks its SIMD at run time. No contraction: the same gradient
# gives the same row on every machine, fused multiply-add or not. No errno from sqrtf, without which g++ does not
# vectorise it (Adam's step at dim 16: 27 ns with errno, 6 ns without; the results are the same).
COPTS = [
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",
    "-fno-math-errno",
]

_ARCHITECTURES = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
]

def cuda_check(name, srcs, hdrs):
    """Compiles each source for sm_80, sm_90 and PTX; `name`.txt says what was compiled, or why nothing was.

    Args:
      name: of the target.
      srcs: .cu files; headers of TensorFlow are not available to them.
      hdrs: the headers they may include.
    """
    if NVCC:
        command = " && ".join([
            "%s -std=c++17 -O3 -Werror all-warnings --expt-relaxed-constexpr %s -I. -c $(location %s) -o /dev/null" % (
                NVCC,
                " ".join(_ARCHITECTURES),
                src,
            )
            for src in srcs
        ] + ["echo 'compiled for sm_80, sm_90 and PTX by %s: %s' >$@" % (NVCC, " ".join(srcs) or "no .cu file")])
    else:
        command = "echo 'skipped: no nvcc (looked at $$NVCC, PATH, /usr/local/cuda/bin)' >$@"
    native.genrule(
        name = name,
        srcs = srcs + hdrs,
        outs = [name + ".txt"],
        cmd = command,
        tags = ["manual"],
    )
