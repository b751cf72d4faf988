"""@local_cuda: nvcc and its toolkit, or the reason why nothing is built for CUDA; and clang.

Targets with device code have it if nvcc is found. (Which of them setup.py builds, library.py says.) Targets whose names end in
cuda12 need nvcc and clang 19. The environment, or --repo_env=NAME=VALUE, sets:

  TF_DYNEMB_CUDA                 0: never build CUDA; 1 (as --config=cuda): fail if there is no nvcc; nvcc: as if it were not set
  TF_DYNEMB_CUDA_ARCHITECTURES   the architectures, "80,90" by default; the last one is also compiled to PTX, which the
                                 driver compiles for newer GPUs
  NVCC                           the compiler, if it is neither on PATH nor where CUDA installs it
  CLANG                          clang, if it is not clang++-19 on PATH
"""

_PLACES = ["/usr/local/cuda/bin/nvcc", "/usr/local/bin/nvcc"]
_ARCHITECTURES = "80,90"

_ON = """package(default_visibility = ["//visibility:public"])

# cuda_runtime.h and cuda.h, for code compiled by the host's compiler.
cc_library(
    name = "headers",
    hdrs = glob(
        ["include/**"],
        exclude = ["include/cccl/**"],
    ),
    includes = ["include"],  # -isystem: our warnings do not apply to them
)

# Linked statically, so that a library with kernels loads without CUDA and without a driver.
cc_library(
    name = "runtime",
    srcs = ["libcudart_static.a"],
    linkopts = [
        "-lrt",
        "-ldl",
        "-lpthread",
    ],
    deps = [":headers"],
)
"""

_OFF = """package(default_visibility = ["//visibility:public"])

cc_library(name = "headers")

cc_library(name = "runtime")
"""

def _off(ctx, why):
    ctx.file("BUILD", _OFF)
    _defs(ctx, nvcc = "", fatbinary = "", flags = [], summary = "skipped: " + why)

def _architectures(ctx):
    names = (ctx.os.environ.get("TF_DYNEMB_CUDA_ARCHITECTURES", "") or _ARCHITECTURES).split(",")
    return [name.strip() for name in names]

# The path of clang, and the first line of its version; both are empty without clang.
def _clang(ctx):
    clang = ctx.os.environ.get("CLANG", "") or str(ctx.which("clang++-19") or "")
    if not clang:
        return "", ""
    version = ctx.execute([clang, "--version"])
    if version.return_code:
        fail("CLANG: %s does not work: %s" % (clang, version.stderr))
    return clang, version.stdout.splitlines()[0]

def _defs(ctx, nvcc, fatbinary, flags, summary):
    clang, clang_summary = _clang(ctx)
    values = {
        "NVCC": nvcc,
        "FATBINARY": fatbinary,
        "ARCHITECTURES": _architectures(ctx),
        "ARCHITECTURE_FLAGS": flags,
        "CUDA_SUMMARY": summary,
        "CLANG": clang,
        "CLANG_SUMMARY": clang_summary,
    }
    ctx.file("defs.bzl", "".join(["%s = %r\n" % item for item in values.items()]))

def _architecture_flags(names):
    for name in names:
        if not name.rstrip("af").isdigit():
            fail("TF_DYNEMB_CUDA_ARCHITECTURES: %r in %s is not an architecture such as 90" % (name, names))
    codes = [(name, "sm_" + name) for name in names[:-1]]
    codes.append((names[-1], "[sm_{0},compute_{0}]".format(names[-1])))
    return ["-gencode=arch=compute_%s,code=%s" % code for code in codes]

# The folders in the words -I... or -L... of the line `name` of `nvcc --dryrun`.
def _folders(lines, name, option):
    for line in lines:
        if line.startswith("#$ %s=" % name):
            words = line.split("=", 1)[1].replace('"', " ").split(" ")
            return [word[len(option):] for word in words if word.startswith(option)]
    return []

def _first(ctx, folders, file, nvcc):
    for folder in folders:
        if ctx.path(folder).get_child(file).exists:
            return ctx.path(folder).get_child(file)
    fail("cuda_configure: %s names no folder with %s (looked at %s); TF_DYNEMB_CUDA=0 builds without CUDA" % (
        nvcc,
        file,
        folders,
    ))

def _cuda_configure_impl(ctx):
    wanted = ctx.os.environ.get("TF_DYNEMB_CUDA", "")
    if wanted not in ["", "0", "1", "nvcc"]:
        fail("TF_DYNEMB_CUDA: %r is not 0, 1 or nvcc" % wanted)
    if wanted == "0":
        return _off(ctx, "TF_DYNEMB_CUDA is 0")

    named = ctx.os.environ.get("NVCC", "")
    if named and not ctx.path(named).exists:
        fail("NVCC: there is no %s" % named)
    places = [named, str(ctx.which("nvcc") or "")] + _PLACES
    found = [place for place in places if place and ctx.path(place).exists]
    if not found:
        if wanted == "1":
            fail("CUDA was requested, but there is no nvcc (looked at $NVCC, PATH, %s)" % ", ".join(_PLACES))
        return _off(ctx, "no nvcc (looked at $NVCC, PATH, %s)" % ", ".join(_PLACES))

    nvcc = found[0]
    version = ctx.execute([nvcc, "--version"])
    dryrun = ctx.execute([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"])
    for result in [version, dryrun]:
        if result.return_code:
            fail("cuda_configure: %s does not work: %s" % (nvcc, result.stderr))
    release = [word for word in version.stdout.replace("\n", " ").replace(",", " ").split(" ") if word.startswith("V")][-1]

    lines = dryrun.stderr.splitlines()
    include = _first(ctx, _folders(lines, "INCLUDES", "-I"), "cuda_runtime.h", nvcc).dirname
    tops = [line.split("=", 1)[1] for line in lines if line.startswith("#$ TOP=")]
    libraries = _folders(lines, "LIBRARIES", "-L") + [top + "/lib64" for top in tops]
    ctx.symlink(include, "include")
    ctx.symlink(_first(ctx, libraries, "libcudart_static.a", nvcc), "libcudart_static.a")
    ctx.file("BUILD", _ON)

    names = _architectures(ctx)
    sanitizers = [ctx.which("compute-sanitizer")] + [ctx.path(top + "/bin/compute-sanitizer") for top in tops]
    sanitizers = [str(place) for place in sanitizers if place and place.exists]
    _defs(
        ctx,
        nvcc = nvcc,
        fatbinary = str(_first(ctx, [top + "/bin" for top in tops], "fatbinary", nvcc)),
        flags = _architecture_flags(names),
        summary = "compiled for %s and PTX by %s %s; %s" % (
            ", ".join(["sm_" + name for name in names]),
            nvcc,
            release,
            sanitizers[0] if sanitizers else "no compute-sanitizer",
        ),
    )

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    doc = "Asks nvcc, if there is one, where its headers and its runtime library are.",
    environ = ["CLANG", "NVCC", "PATH", "TF_DYNEMB_CUDA", "TF_DYNEMB_CUDA_ARCHITECTURES"],
    local = True,
)
