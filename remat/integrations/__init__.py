"""Functions that enable remat in models of other libraries. A library is imported only when its function is called."""

from . import transformers

__all__ = ["transformers"]
