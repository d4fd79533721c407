"""How Sphinx builds these pages: sphinx-build -W docs build/docs."""

import tileattn

project = "tileattn"
author = "The tileattn developers"
copyright = author
release = version = tileattn.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
]
templates_path = ["templates"]
html_theme = "furo"
html_title = f"tileattn {release}"

# Types stand in the docstrings, with shapes; the signatures are for reading.
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_member_order = "groupwise"
autosummary_generate = True
autosummary_ignore_module_all = False
numpydoc_show_class_members = False
numpydoc_attributes_as_param_list = True
# A name in backquotes is a link where it is the name of something documented here.
default_role = "autolink"

myst_heading_anchors = 3
nitpicky = True
# Arguments and attributes that have the name of an inner module, and are links to nothing.
nitpick_ignore = [("py:obj", name) for name in ("cache", "chunks", "rope")]
