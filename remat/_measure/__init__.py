"""Runs a user's program to measure what it saves, computes and changes."""
