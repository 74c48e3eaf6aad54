"""Alone in its folder, because Python looks for modules first where the file lies that it was
started with.
"""
