"""Models and data that are shipped by name, registered as any other package does it
(`framework/registry.py`): no room of the trainer names them.

A recipe's `kinds.py` has the typed sections, without torch.
"""
