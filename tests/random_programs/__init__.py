"""Random programs: a seed determines the source of a function with regions, which runs with and without them."""
