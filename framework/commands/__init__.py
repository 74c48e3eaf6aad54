"""Commands that need torch: `export`, `generate`. `framework.cli` imports them by name when they
are asked for.
"""
