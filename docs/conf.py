"""Sphinx's settings for the site, which tools/build_site.py builds."""

import re

from tf_dynemb._version import __version__

project = "tf_dynemb"
version = release = __version__
html_title = f"tf_dynemb {__version__}"
html_theme = "furo"
html_show_copyright = html_show_sourcelink = html_copy_source = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "index"
myst_heading_anchors = 4  # links such as page.md#heading
pygments_style, pygments_dark_style = "friendly", "github-dark"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
maximum_signature_line_length = 88
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
suppress_warnings = ["ref.python"]  # `Variable` in a signature is a name of three modules
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
add_module_names = False


def as_rest(app, what, name, obj, options, lines):
    """Docstrings have code in single backticks, as the documents, and examples without a margin."""
    lines[:] = [re.sub(r"^Example:$", ".. rubric:: Example\n", each) for each in lines]
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)(\w?)", r"``\1``\\ \2", "\n".join(lines))
    lines[:] = text.replace("``\\ \n", "``\n").split("\n")


def is_left_out(app, what, name, obj, skip, options):
    """Members that only raise an error, such as `scatter_max` of tables, are left out."""
    return True if getattr(obj, "__name__", "").startswith("_") else None


def setup(app):
    """Registers both with Sphinx."""
    app.connect("autodoc-process-docstring", as_rest, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", is_left_out)
