"""Checkpointed regions: a call of a rematerialized function, with all that its recompute needs."""
