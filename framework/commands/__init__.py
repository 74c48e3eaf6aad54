"""A file for each command; `table.py` has all of them."""
