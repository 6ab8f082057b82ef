"""Benchmarks: each is `python -m benchmarks.NAME` and prints one table."""
