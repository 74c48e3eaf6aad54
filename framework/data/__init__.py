"""Datasets, and the loaders that hand each rank its share of them.

    splits.py           what a dataset builder returns, and the fingerprint of its text, for checkpoints
    text_windows.py, text_pairs.py     text for GPT and BERT, out of tokens.py (token folders, or Python's sources)
    prepare.py          the command that makes a token folder: documents.py -> tokenizer.py -> token_writer.py; no torch
    token_files.py      what a token folder says of itself; read by the planner, so neither torch nor numpy
    order.py -> loaders.py -> batches.py     from sample numbers to batches

Nothing here knows about process groups: rank and world size are arguments, so that every promise is
tested in one process.
"""
