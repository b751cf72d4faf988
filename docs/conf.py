"""Sphinx's settings for the site, which tools/build_site.py builds."""

import re

from tf_dynemb._version import __version__

project = "tf_dynemb"
version = release = __version__
html_title = f"tf_dynemb {__version__}"
html_theme = "furo"
html_static_path = html_css_files = ["theme.css"]
html_show_copyright = html_show_sourcelink = html_copy_source = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "index"
myst_heading_anchors = 4  # links such as page.md#heading
pygments_style, pygments_dark_style = "friendly", "github-dark"

autodoc_default_options = {
    "members": True,
    "inherited-members": True,
    "member-order": "bysource",
}
autodoc_typehints = "signature"
maximum_signature_line_length = 88
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
suppress_warnings = ["ref.python"]  # `Variable` in a signature is a name of three modules
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
add_module_names = False


def as_rest(app, what, name, obj, options, lines):
    """Docstrings have code in single backticks, as the documents, and examples without a margin.

    Pages are named by their paths. A colon in the first line of a property or of what is returned
    does not end a type.
    """
    lines[:] = [re.sub(r"^Example:$", ".. rubric:: Example\n", each) for each in lines]
    firsts = [i + 1 for i, each in enumerate(lines[:-1]) if each in ("Returns:", "Yields:")]
    if what in ("attribute", "property"):
        firsts.append(0)
    for i in firsts:
        lines[i] = lines[i].replace(": ", " \N{EN DASH} ", 1)
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)(\w?)", r"``\1``\\ \2", "\n".join(lines))
    text = re.sub(r"(?<![\w/`])docs/([\w/]+)\.md", r":doc:`/\1`", text)
    lines[:] = text.replace("``\\ \n", "``\n").split("\n")


def is_left_out(app, what, name, obj, skip, options):
    """Members of TensorFlow, Keras and Python, and those that only raise an error, are left out."""
    function = getattr(obj, "fget", obj)
    if getattr(function, "__name__", "").startswith("_"):
        return True
    module = getattr(function, "__module__", None)
    is_builtin = type(obj).__name__.endswith(("_descriptor", "builtin_function_or_method"))
    return True if is_builtin or (module or "tf_dynemb").split(".")[0] != "tf_dynemb" else None


def setup(app):
    """Registers both with Sphinx."""
    app.connect("autodoc-process-docstring", as_rest, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", is_left_out)
