"""``python -m deepspeed_lint``: the command ``deepspeed-lint``."""

import sys

from deepspeed_lint.cli import main

if __name__ == "__main__":
    sys.exit(main())
