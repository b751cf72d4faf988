"""@local_cuda: where nvcc is, or that there is none."""

_PLACES = ["/usr/local/bin/nvcc", "/usr/local/cuda/bin/nvcc"]

def _cuda_configure_impl(ctx):
    places = [ctx.os.environ.get("NVCC", ""), str(ctx.which("nvcc") or "")] + _PLACES
    found = [place for place in places if place and ctx.path(place).exists]
    ctx.file("BUILD", "")
    ctx.file("defs.bzl", "NVCC = %s\n" % repr(found[0] if found else ""))

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    doc = "Looks for nvcc at $NVCC, on PATH, and where CUDA installs it.",
    environ = ["NVCC", "PATH"],
    local = True,
)
