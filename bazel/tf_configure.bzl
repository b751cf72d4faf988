"""@local_tf: headers, flags and libraries of the TensorFlow of one Python, or of the workspace that links our operators."""

_BUILD = """package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    defines = {defines},
    includes = ["include"],  # -isystem: our warnings do not apply to them
)

exports_files(["{framework}", "libtensorflow_cc.so.2"])
"""

_DEFS = """TF_FRAMEWORK = "@local_tf//:{framework}"
TF_CC = "@local_tf//:libtensorflow_cc.so.2"
TF_FOLDER = "{folder}"
"""

_WORKSPACE_BUILD = """package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    defines = ["DYNEMB_TENSORFLOW_MINOR={minor}"],
    deps = {deps},
)
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
    folder, _, framework = tf["framework"].rpartition("/")
    ctx.symlink(tf["include"], "include")
    ctx.symlink(tf["framework"], framework)
    ctx.symlink(folder + "/libtensorflow_cc.so.2", "libtensorflow_cc.so.2")
    ctx.file("BUILD", _BUILD.format(defines = repr(tf["defines"]), framework = framework))
    ctx.file("defs.bzl", _DEFS.format(framework = framework, folder = folder))

tf_configure = repository_rule(
    implementation = _tf_configure_impl,
    doc = "Runs PYTHON_BIN_PATH, .venv/bin/python or python3, the first one available, and asks it for its TensorFlow.",
    # Not local, because a local rule would import TensorFlow at each start of the Bazel server. DYNEMB_TENSORFLOW changes with
    # TensorFlow.
    environ = ["PYTHON_BIN_PATH", "DYNEMB_TENSORFLOW"],
)

def _tf_of_workspace_impl(ctx):
    ctx.file("BUILD", _WORKSPACE_BUILD.format(minor = ctx.attr.minor, deps = repr(ctx.attr.deps)))
    ctx.file("defs.bzl", "TF_FRAMEWORK = None\nTF_CC = None\nTF_FOLDER = None\n")

tf_of_workspace = repository_rule(
    implementation = _tf_of_workspace_impl,
    attrs = {
        "deps": attr.string_list(
            doc = "Labels of TensorFlow's framework, such as @org_tensorflow//tensorflow/core:framework.",
            mandatory = True,
        ),
        "minor": attr.int(doc = "21 for TensorFlow 2.21.", mandatory = True),
    },
    doc = "In place of tf_configure in a workspace that builds TensorFlow, and links //cc/tf:operators.",
)
