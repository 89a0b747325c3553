"""Hostile clients and hostile bytes, in one place for the tests and for `benchmarks/`."""
