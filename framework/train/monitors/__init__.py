"""Destinations of metrics: one file per destination, all behind `Monitor`."""
