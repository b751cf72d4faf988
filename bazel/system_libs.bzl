"""@gtest and @benchmark from the distribution's packages.

A missing package must not stop `pip install .`, which needs neither: the repository is created either way, and a target
that uses it says what to install.
"""

_MISSING = """package(default_visibility = ["//visibility:public"])

genrule(
    name = "missing",
    outs = ["missing.h"],
    cmd = "echo '{message}' >&2; exit 1",
)

cc_library(
    name = "{name}",
    hdrs = ["missing.h"],
)
"""

# Built from source, not the installed archive: under a sanitizer, all code in the program must be instrumented.
_GTEST = """package(default_visibility = ["//visibility:public"])

cc_library(
    name = "gtest_main",
    srcs = glob(["src/*.h", "src/*.cc"], exclude = ["src/gtest-all.cc"]),
    hdrs = glob(["include/**/*.h"]),
    copts = ["-Iexternal/gtest", "-w"],
    includes = ["include"],
    linkopts = ["-pthread"],
    linkstatic = True,
)
"""

_BENCHMARK = """package(default_visibility = ["//visibility:public"])

cc_library(
    name = "benchmark_main",
    linkopts = ["-lbenchmark_main", "-lbenchmark", "-pthread"],
)
"""

def _missing(ctx, name, what):
    ctx.file("BUILD", _MISSING.format(
        name = name,
        message = "%s is missing: apt-get install %s, then bazel shutdown" % (what, ctx.attr.package),
    ))

def _gtest_impl(ctx):
    source = ctx.path("/usr/src/googletest/googletest")
    if not source.exists:
        return _missing(ctx, "gtest_main", "GoogleTest")
    ctx.symlink(source.get_child("src"), "src")
    ctx.symlink(source.get_child("include"), "include")
    ctx.file("BUILD", _GTEST)

def _benchmark_impl(ctx):
    if not ctx.path("/usr/include/benchmark/benchmark.h").exists:
        return _missing(ctx, "benchmark_main", "Google Benchmark")
    ctx.file("BUILD", _BENCHMARK)

system_gtest = repository_rule(
    implementation = _gtest_impl,
    attrs = {"package": attr.string(default = "libgtest-dev")},
    doc = "GoogleTest from the sources that libgtest-dev installs.",
    local = True,
)

system_benchmark = repository_rule(
    implementation = _benchmark_impl,
    attrs = {"package": attr.string(default = "libbenchmark-dev")},
    doc = "Google Benchmark as installed by libbenchmark-dev.",
    local = True,
)
