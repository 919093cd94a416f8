"""Benchmarks, and the measuring tools that they share with the tests."""
