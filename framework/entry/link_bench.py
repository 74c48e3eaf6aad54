"""The script of the ranks of `doctor --bench`."""

import sys

from framework.engine.link_bench import main

if __name__ == "__main__":
    sys.exit(main())
