"""deepspeed-lint: check, fix, resolve and explain the JSON that DeepSpeed is configured with."""

__version__ = "0.1.0"
