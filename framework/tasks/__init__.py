"""Meaning of a batch: its inputs and targets, its loss, its metrics."""
