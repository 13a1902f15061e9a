"""Benchmarks: one question each, the answer as a ratio against a floor measured in the same run."""
