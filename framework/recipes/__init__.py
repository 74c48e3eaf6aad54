"""Models and data that are shipped by name, registered as those of any other package are
(`framework/registry.py`): no room of the trainer names them.

A recipe's `kinds.py` has the typed sections, without torch.
"""
