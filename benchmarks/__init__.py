"""Measured comparisons. Each is started as `python -m benchmarks.NAME`; `results/` holds what was
found, and on which machine.
"""
