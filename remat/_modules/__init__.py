"""Modules whose calls are regions."""
