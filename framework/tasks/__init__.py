"""What a batch means: its inputs and targets, its loss, its metrics."""
