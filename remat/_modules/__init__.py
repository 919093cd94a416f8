"""Modules whose calls are checkpointed regions."""
