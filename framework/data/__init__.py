"""Datasets, and the loaders that hand each rank its share of them.

    splits.py           result of a dataset builder, and the fingerprint of its text, for
                        checkpoints
    text_windows.py,    text for GPT and BERT, out of tokens.py (token folders, or Python's
    text_pairs.py       sources)
    prepare.py          the command that makes a token folder, without torch:
                        documents.py -> tokenizer.py -> token_writer.py
    token_files.py      the files of a token folder; read by the planner, so neither torch nor numpy
    order.py -> loaders.py -> batches.py
                        from sample numbers to batches

Nothing here knows about process groups: rank and world size are arguments, so that every promise is
tested in one process.
"""
