"""Rules and options that compile this project's C++ and CUDA."""

load(
    "@local_cuda//:defs.bzl",
    "ARCHITECTURES",
    "ARCHITECTURE_FLAGS",
    "CLANG",
    "CLANG_SUMMARY",
    "CUDA_SUMMARY",
    "FATBINARY",
    "NVCC",
)

# Whether code for drivers of CUDA 12 can be compiled.
CUDA12 = bool(NVCC and CLANG)

_CUDA12_SUMMARY = "for drivers of CUDA 12: " + (
    "%s; %s" % (CUDA_SUMMARY, CLANG_SUMMARY) if CUDA12 else "skipped: no nvcc, or no clang 19 (package clang-19)"
)

# No -march: a wheel has to run on any x86-64; the code chooses its SIMD at run time. No contraction: the same gradient
# gives the same row on every machine, with or without fused multiply-add. No errno from sqrtf: with errno, g++ does not
# vectorize it (Adam's step at dim 16: 27 ns with errno, 6 ns without; the results are the same).
COPTS = [
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",
    "-fno-math-errno",
]

# The same for nvcc, whose option against contraction is --fmad=false.
_NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-Werror=all-warnings",
    "--expt-relaxed-constexpr",
    "--fmad=false",
    "--diag-suppress=2810",  # mistakes `status = f();` for an ignored status; g++ checks those
    "-Xcompiler=" + ",".join(COPTS + ["-fPIC"]),
]

# Lines that ptxas -v does not print are warnings.
_NVCC_SCRIPT = """
set -f
source=$1 out=$2 report=$3 && shift 3
echo "$DYNEMB_CUDA" >"$report"
"$NVCC" $NVCC_FLAGS "$@" -Xptxas=-v -c "$source" -o "$out" 2>>"$report" || { cat "$report" >&2; exit 1; }
tail -n +2 "$report" | grep -v -e "^ptxas info" -e "bytes stack frame" >&2 || true
"""

# What compiles for drivers of CUDA 12:
#
# - nvcc compiles the kernels to PTX, with the headers of CUDA 12. nvcc 13 calls it version 9.0; without a hint, it is 8.0, which CUDA
#   12.0 has, and ptxas checks that.
# - CUDA 12's ptxas makes code for each architecture. The PTX itself, of the first one, is for newer GPUs.
# - clang compiles the host's code, which nvcc 13 would compile for its own runtime library. Both must give a kernel the same name.
_CUDA12_SCRIPT = """
set -ef
source=$1 out=$2 report=$3 && shift 3
first=${ARCHITECTURES%% *}
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
echo "$DYNEMB_CUDA" >"$report"
"$NVCC" $NVCC_FLAGS -I"$CUDA/include" "$@" -arch=compute_$first -ptx "$source" -o "$temporary/13.ptx"
sed -e 's/^[.]version .*/.version 8.0/' -e '/[.]pragma "used_bytes_mask /d' "$temporary/13.ptx" >"$temporary/ptx"
images=--image3=kind=ptx,sm=$first,file=$temporary/ptx
for architecture in $ARCHITECTURES; do
  "$CUDA/bin/ptxas" -v -O3 --fmad false -arch=sm_$architecture "$temporary/ptx" -o "$temporary/$architecture" \
    2>>"$report" || { cat "$report" >&2; exit 1; }
  images="$images --image3=kind=elf,sm=$architecture,file=$temporary/$architecture"
done
# CUDA 13's default for compression is one that the first drivers of CUDA 12 cannot read.
"$FATBINARY" -64 --create "$temporary/images" --compress-mode=speed --compress-all $images
"$CLANG" -x cuda $CLANG_FLAGS --cuda-path="$CUDA" "$@" --cuda-host-only -D__CUDA_ARCH_LIST__=${first}0 \
  -Xclang -fcuda-include-gpubinary -Xclang "$temporary/images" -c "$source" -o "$out"
readelf -p .rodata.str1.1 "$out" | grep -o '_Z[A-Za-z0-9_]*$' | sort >"$temporary/called"
grep -o 'entry _Z[A-Za-z0-9_]*' "$temporary/ptx" | cut -d' ' -f2 | sort >"$temporary/compiled"
missing=$(comm -23 "$temporary/called" "$temporary/compiled")
if [ ! -s "$temporary/called" ] || [ -n "$missing" ]; then
  echo "$source: nvcc and clang name these kernels differently:" $missing >&2
  exit 1
fi
"""

_CLANG_FLAGS = [
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-Werror",
    "-Wno-unknown-cuda-version",  # clang 19 knows CUDA up to 12.5
    "-Wno-deprecated-declarations",  # libstdc++'s own std::stable_sort
] + COPTS

# With these, a program needs only a driver and a C library. The runtime library is named before Bazel's own -lstdc++, which
# then adds nothing.
_STANDALONE = [
    "-static-libgcc",
    "-l:libstdc++.a",
    "-Wl,--as-needed",
]

# Compiles each source by a script, whose arguments are the source, the object, a report of what ptxas says of each kernel (for
# tools/kernel_resources.py), and flags for headers. The headers of deps are tracked as in a cc_library. `isystem` is the flag
# for a folder of others' headers.
def _compile(ctx, script, env, isystem, mnemonic, toolkit = []):
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]
    flags = ["-I."]
    for context in contexts:
        flags += ["-I" + folder for folder in (context.quote_includes.to_list() + context.includes.to_list())]
        flags += [isystem + folder for folder in context.system_includes.to_list()]
        flags += ["-D" + define for define in context.defines.to_list()]
    unique = []
    for flag in flags:
        if flag not in unique:
            unique.append(flag)

    objects = []
    for source in ctx.files.srcs:
        out = ctx.actions.declare_file("_%s/%s.o" % (ctx.label.name, source.basename[:-len(".cu")]))
        report = ctx.actions.declare_file(out.basename[:-len(".o")] + ".ptxas", sibling = out)
        objects.append(out)
        ctx.actions.run_shell(
            command = script,
            arguments = [source.path, out.path, report.path] + " ".join(unique).split(" "),
            inputs = depset(
                [source] + ctx.files.hdrs + toolkit,
                transitive = [context.headers for context in contexts],
            ),
            outputs = [out, report],
            # nvcc finds the host's compiler on PATH.
            env = dict(env, PATH = "/usr/local/bin:/usr/bin:/bin"),
            mnemonic = mnemonic,
            progress_message = "Compiling %s (%s)" % (source.short_path, mnemonic),
        )
    return [DefaultInfo(files = depset(objects))]

def _cuda_objects_impl(ctx):
    # The summary is there so that another nvcc at the same path recompiles.
    return _compile(ctx, _NVCC_SCRIPT, {
        "DYNEMB_CUDA": CUDA_SUMMARY,
        "NVCC": NVCC,
        "NVCC_FLAGS": " ".join(_NVCC_FLAGS + ARCHITECTURE_FLAGS),
    }, "-isystem=", "Nvcc")

def _cuda12_objects_impl(ctx):
    toolkit = ctx.files._toolkit
    return _compile(ctx, _CUDA12_SCRIPT, {
        "ARCHITECTURES": " ".join(ARCHITECTURES),
        "CLANG": CLANG,
        "CLANG_FLAGS": " ".join(_CLANG_FLAGS),
        "CUDA": toolkit[0].path.split("/cuda/")[0] + "/cuda",
        "DYNEMB_CUDA": _CUDA12_SUMMARY,
        "FATBINARY": FATBINARY,
        "NVCC": NVCC,
        "NVCC_FLAGS": " ".join(_NVCC_FLAGS),
    }, "-isystem ", "Cuda12", toolkit)

_ATTRIBUTES = {
    "srcs": attr.label_list(allow_files = [".cu"]),
    "hdrs": attr.label_list(allow_files = True),
    "deps": attr.label_list(providers = [CcInfo]),
}

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = _ATTRIBUTES,
)

# For drivers of CUDA 12.
_cuda12_objects = rule(
    implementation = _cuda12_objects_impl,
    attrs = dict(_ATTRIBUTES, _toolkit = attr.label(default = "@cuda12//:toolkit")),
)

def _objects(name, srcs, hdrs, deps, testonly, rule_of = _cuda_objects):
    """Returns srcs with the label of their objects in place of the .cu files."""
    kernels = [src for src in srcs if src.endswith(".cu")]
    if not kernels:
        return srcs
    rule_of(
        name = name + "_objects",
        testonly = testonly,
        srcs = kernels,
        hdrs = hdrs,
        tags = ["manual"],
        deps = deps,
    )
    return [src for src in srcs if not src.endswith(".cu")] + [":%s_objects" % name]

def _report(name, srcs, built, testonly = False, summary = CUDA_SUMMARY):
    native.genrule(
        name = name,
        testonly = testonly,
        srcs = built,
        outs = [name + ".txt"],
        cmd = "echo '%s: %s' >$@" % (summary, " ".join(srcs) or "no .cu file"),
        tags = ["manual"],
    )

def cuda_check(name, srcs, hdrs):
    """Compiles each source; `name`.txt lists the sources and the architectures, or says why nothing was compiled.

    Args:
      name: of the target.
      srcs: .cu files; headers of TensorFlow are not available to them.
      hdrs: the headers that they may include.
    """
    built = _objects(name, srcs, hdrs, [], False) if NVCC else []
    _report(name, srcs, built)

def cuda_library(name, srcs, hdrs = [], deps = [], testonly = False):
    """A cc_library with kernels; an empty one if CUDA is not built.

    Code that depends on it is compiled with DYNEMB_CUDA=1 if CUDA is built. Target `name`_check writes a text like that
    of cuda_check.

    Args:
      name: of the target.
      srcs: .cu files, compiled by nvcc, and .cc files that include CUDA's headers.
      hdrs: headers.
      deps: libraries.
      testonly: as in Bazel's rules.
    """
    built = []
    if NVCC:
        built = _objects(name, srcs, hdrs, deps, testonly)
        native.cc_library(
            name = name,
            testonly = testonly,
            srcs = built,
            hdrs = hdrs,
            copts = COPTS,
            defines = ["DYNEMB_CUDA=1"],
            deps = deps + ["@local_cuda//:runtime"],
        )
    else:
        native.cc_library(
            name = name,
            testonly = testonly,
            deps = deps,
        )
    _report(name + "_check", srcs, [":" + name] if built else [], testonly)

def cuda12_library(name, srcs, hdrs, deps, testonly = False):
    """The same for drivers of CUDA 12; empty without nvcc or clang. Only built where something needs it.

    Args:
      name: of the target.
      srcs: .cu files, and .cc files that include CUDA's headers.
      hdrs: headers.
      deps: libraries.
      testonly: as in Bazel's rules.
    """
    if CUDA12:
        native.cc_library(
            name = name,
            testonly = testonly,
            srcs = _objects(name, srcs, hdrs, deps, testonly, _cuda12_objects),
            hdrs = hdrs,
            copts = COPTS,
            defines = ["DYNEMB_CUDA=1"],
            tags = ["manual"],
            deps = deps + ["@cuda12//:runtime"],
        )
    else:
        native.cc_library(
            name = name,
            testonly = testonly,
            deps = deps,
        )
    _report(name + "_check", srcs, [":" + name] if CUDA12 else [], testonly, _CUDA12_SUMMARY)

def cuda_host_library(name, srcs, hdrs, deps, cuda = "@local_cuda", **kwargs):
    """A cc_library, for tests, of sources that include CUDA's headers, without its runtime library; empty if CUDA is not built.

    Args:
      name: of the target.
      srcs: .cc files.
      hdrs: headers.
      deps: libraries.
      cuda: the repository that has CUDA's headers.
      **kwargs: for cc_library.
    """
    native.cc_library(
        name = name,
        testonly = True,
        srcs = srcs if NVCC else [],
        hdrs = hdrs if NVCC else [],
        copts = COPTS,
        deps = deps + [cuda + "//:headers"],
        **kwargs
    )

def _binary(rule_of, name, srcs, hdrs, deps, **kwargs):
    rule_of(
        name = name,
        testonly = True,
        srcs = _objects(name, srcs, hdrs, deps, True) + hdrs,
        copts = COPTS,
        deps = deps + ["@local_cuda//:runtime"],
        **kwargs
    )

def cuda_binary(name, srcs, deps, hdrs = [], linkshared = False):
    """A program, or a shared library, with kernels, for tests and benchmarks. Nothing if CUDA is not built.

    To run, a program needs only a driver and the C library.

    Args:
      name: of the target.
      srcs: .cu and .cc files.
      deps: libraries.
      hdrs: headers of these sources only.
      linkshared: whether it is a library.
    """
    if NVCC:
        linkopts = ["-Wl,-z,defs"] if linkshared else _STANDALONE
        _binary(native.cc_binary, name, srcs, hdrs, deps, linkopts = linkopts, linkshared = linkshared)

def cuda12_shared_library(name, srcs, deps):
    """A shared library with kernels for drivers of CUDA 12, for tests. Nothing if that cannot be compiled.

    Args:
      name: of the target.
      srcs: .cu and .cc files.
      deps: libraries.
    """
    if CUDA12:
        native.cc_binary(
            name = name,
            testonly = True,
            srcs = _objects(name, srcs, [], deps, True, _cuda12_objects),
            copts = COPTS,
            linkopts = ["-Wl,-z,defs"],
            linkshared = True,
            tags = ["manual"],
            deps = deps + ["@cuda12//:runtime"],
        )

def cuda12_test(name, **kwargs):
    """A test of such libraries; if they cannot be compiled, a test that says so.

    Args:
      name: of the target.
      **kwargs: for cc_test.
    """
    if CUDA12:
        native.cc_test(
            name = name,
            copts = COPTS,
            tags = ["manual"],
            **kwargs
        )
    else:
        _skipped_test(name, _CUDA12_SUMMARY)

def cuda_test(name, srcs, deps, hdrs = [], **kwargs):
    """A test with kernels. If CUDA is not built, a test in its place says so, and passes.

    Args:
      name: of the target.
      srcs: .cu and .cc files. Without a GPU the test must pass, and report that it was skipped.
      deps: libraries.
      hdrs: headers of these sources only.
      **kwargs: for cc_test.
    """
    if NVCC:
        _binary(native.cc_test, name, srcs, hdrs, deps, linkopts = _STANDALONE, linkstatic = True, **kwargs)
    else:
        _skipped_test(name)

def _skipped_test(name, summary = CUDA_SUMMARY):
    native.genrule(
        name = name + "_skip",
        testonly = True,
        outs = [name + "_skip.sh"],
        cmd = "printf '#!/bin/sh\\necho \"%s\"\\n' >$@" % summary.replace("$", ""),
    )
    native.sh_test(
        name = name,
        size = "small",
        srcs = [name + "_skip.sh"],
    )

# With a stand-in for CUDA: the host's compiler compiles .cu files, whose kernels are those of the stand-in's header.

def _host_sources(name, kernels):
    """Returns a source for each .cu file, by its label, that includes it."""
    sources = []
    for label in kernels:
        package, file = label[len("//"):].split(":")
        source = "_%s/%s.cc" % (name, file[:-len(".cu")])
        native.genrule(
            name = source + "_source",
            testonly = True,
            outs = [source],
            cmd = "echo '#include \"%s/%s\"' >$@" % (package, file),
        )
        sources.append(source)
    if kernels:
        native.cc_library(
            name = name + "_kernels",
            testonly = True,
            textual_hdrs = kernels,
        )
    return sources

def stand_in_library(name, srcs, hdrs, kernels, stand_in, deps, cuda = "@local_cuda", **kwargs):
    """The stand-in, and code with kernels; nothing if CUDA is not built.

    Args:
      name: of the target.
      srcs: .cc files.
      hdrs: headers.
      kernels: labels of .cu files.
      stand_in: the path of the header that takes the place of CUDA's kernels.
      deps: libraries.
      cuda: the repository that has CUDA's headers.
      **kwargs: for cc_library.
    """
    if NVCC:
        native.cc_library(
            name = name,
            testonly = True,
            srcs = srcs + _host_sources(name, kernels),
            hdrs = hdrs,
            copts = COPTS,
            defines = [
                "DYNEMB_CUDA=1",
                'DYNEMB_CUDA_STAND_IN=\\"%s\\"' % stand_in,
            ],
            alwayslink = True,  # deps call its functions
            deps = deps + ([":%s_kernels" % name] if kernels else []) + [cuda + "//:headers"],
            **kwargs
        )

def _stand_in(rule_of, name, srcs, kernels, deps, **kwargs):
    rule_of(
        name = name,
        testonly = True,
        srcs = srcs + _host_sources(name, kernels),
        copts = COPTS,
        deps = deps + ([":%s_kernels" % name] if kernels else []),
        **kwargs
    )

def stand_in_binary(name, deps, srcs = [], kernels = []):
    """A program on a stand-in for CUDA; nothing if CUDA is not built.

    Args:
      name: of the target.
      deps: libraries, among them one of stand_in_library.
      srcs: .cc files.
      kernels: labels of .cu files.
    """
    if NVCC:
        _stand_in(native.cc_binary, name, srcs, kernels, deps)

def stand_in_test(name, deps, srcs = [], kernels = [], **kwargs):
    """A test on a stand-in for CUDA; if CUDA is not built, a test that says so.

    Args:
      name: of the target.
      deps: libraries, among them one of stand_in_library.
      srcs: .cc files.
      kernels: labels of .cu files.
      **kwargs: for cc_test.
    """
    if NVCC:
        _stand_in(native.cc_test, name, srcs, kernels, deps, linkstatic = True, **kwargs)
    else:
        _skipped_test(name)
