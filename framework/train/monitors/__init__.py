"""Where metrics go: one file per destination, all behind `Monitor`."""
