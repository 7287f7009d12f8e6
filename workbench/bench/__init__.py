"""Benchmarks: what recording costs, and how often the verdict is right."""
