"""Sphinx configuration."""

from importlib.metadata import version as installed_version

from docutils import nodes

project = "remat"
author = "The remat authors"
copyright = "The remat authors"
version = release = installed_version("remat")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "remat"


def leave_out_any(app, domain, objtype, content):
    """A type of ``Any`` says nothing: overloads in the signature do."""
    for field in list(content.findall(nodes.field)):
        name, body = field.children
        if name.astext().split()[0] in ("type", "rtype") and body.astext().strip() == "Any":
            field.parent.remove(field)


def setup(app):
    """After the types were merged into the description."""
    app.connect("object-description-transform", leave_out_any, priority=900)
