"""One line for the user of another library. None of these libraries is imported before it is called."""

from . import transformers

__all__ = ["transformers"]
