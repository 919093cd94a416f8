"""One call of a rematerialized function, and all that it takes to recompute it."""
