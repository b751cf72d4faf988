"""@local_tf: headers, flags and libtensorflow_framework of the TensorFlow of one Python."""

_BUILD = """package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    defines = {defines},
    includes = ["include"],  # -isystem: our warnings do not apply to them
)

exports_files(["{framework}"])
"""

def _python(ctx):
    if "PYTHON_BIN_PATH" in ctx.os.environ:
        return ctx.os.environ["PYTHON_BIN_PATH"]
    venv = ctx.path(Label("//bazel:BUILD")).dirname.dirname.get_child(".venv").get_child("bin").get_child("python")
    if venv.exists:
        return str(venv)
    python = ctx.which("python3")
    if not python:
        fail("tf_configure: no python3 on PATH; set PYTHON_BIN_PATH, or run tools/setup.sh")
    return str(python)

def _tf_configure_impl(ctx):
    script = ctx.path(Label("//bazel:find_tensorflow.py"))
    ctx.path(Label("//tf_dynemb:_version.py"))  # read by the script; a change reruns this rule
    result = ctx.execute([_python(ctx), "-B", script, "details"], environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    })
    if result.return_code:
        fail("tf_configure: " + result.stderr)
    tf = json.decode(result.stdout.splitlines()[-1])
    framework = tf["framework"].split("/")[-1]
    ctx.symlink(tf["include"], "include")
    ctx.symlink(tf["framework"], framework)
    ctx.file("BUILD", _BUILD.format(defines = repr(tf["defines"]), framework = framework))
    ctx.file("defs.bzl", 'TF_FRAMEWORK = "@local_tf//:%s"\n' % framework)

tf_configure = repository_rule(
    implementation = _tf_configure_impl,
    doc = "Runs PYTHON_BIN_PATH, .venv/bin/python or python3, the first one available, and asks it for its TensorFlow.",
    # Not local, because a local rule would import TensorFlow at each start of the Bazel server. DYNEMB_TENSORFLOW changes with
    # TensorFlow.
    environ = ["PYTHON_BIN_PATH", "DYNEMB_TENSORFLOW"],
)
