"""Functions that enable remat in models of other libraries. A library is imported only when its function is called."""

from . import lightning, transformers

__all__ = ["lightning", "transformers"]
