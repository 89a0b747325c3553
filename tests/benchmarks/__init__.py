"""Benchmarks can fail, and what they wrote is what the documents say."""
