"""One call of a rematerialized function, and all that is needed to recompute it."""
