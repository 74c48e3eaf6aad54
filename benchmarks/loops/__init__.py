"""Loops that benchmarks hold against each other."""
