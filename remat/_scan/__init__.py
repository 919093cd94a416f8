"""Loops of equal steps, with the fewest recomputed steps for a number of saved carries."""
