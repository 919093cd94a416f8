"""Loops of equal steps, with the fewest recomputed steps for the carries that are kept."""
