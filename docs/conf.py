"""Sphinx configuration."""

import re
from importlib.metadata import version as installed_version

from docutils import nodes

project = "remat"
author = "The remat authors"
copyright = "The remat authors"
version = release = installed_version("remat")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"PolicyLike": "PolicyLike", "Where": "Where"}
python_use_unqualified_type_names = True
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"remat {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]


def leave_out_any(app, domain, objtype, content):
    """A type of ``Any`` says nothing: overloads in the signature do."""
    for field in list(content.findall(nodes.field)):
        name, body = field.children
        if name.astext().split()[0] in ("type", "rtype") and body.astext().strip() == "~typing.Any":
            field.parent.remove(field)


def name_aliases(app, domain, objtype, content):
    """Aliases of types in descriptions are shown by their names."""
    for text in list(content.findall(nodes.Text)):
        if "TypeAliasForwardRef" in text:
            text.parent.replace(text, nodes.Text(re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)))


def drop_last_blank_line(app, name, source):
    """The blank line at the end of a code block is for doctest: it ends the expected output."""
    source[0] = re.sub(r"\n\n```$", "\n```", source[0], flags=re.MULTILINE)


def setup(app):
    """`leave_out_any` runs after autodoc has merged the types into the description."""
    app.connect("source-read", drop_last_blank_line)
    app.connect("object-description-transform", leave_out_any, priority=900)
    app.connect("object-description-transform", name_aliases, priority=901)
