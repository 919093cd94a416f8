"""Sphinx configuration."""

from importlib.metadata import version as installed_version

project = "remat"
author = "The remat authors"
copyright = "The remat authors"
version = release = installed_version("remat")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "description"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "remat"
