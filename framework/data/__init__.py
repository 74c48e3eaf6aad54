"""Datasets, and the loaders that hand each rank its share of them.

    splits.py           what a dataset builder returns; identity.py: which text it is, for checkpoints
    digits.py, torchvision_sets.py, image_folder.py, synthetic.py      the known datasets
    images.py           images in memory, fetched a batch at a time; batches.py: what such a batch looks like
    text_windows.py, text_pairs.py     text for GPT and BERT, out of tokens.py: python_sources.py, or a token_folder.py
    prepare.py          the command that makes such a folder: documents.py -> tokenizer.py -> token_writer.py; no torch
    in these order.py            which samples a step takes: a pure function of (seed, epoch, step, rank)
    seed_mix.py, sample_seed.py        randomness of a sample: a pure function of (seed, epoch, sample index)
    train_loader.py, eval_loader.py    the endless training stream, the exact-once evaluation pass
    worker_process.py   what both start in each process that fetches for them

Nothing here knows about process groups: rank and world size are arguments, so that every promise is tested in one
process.
"""
