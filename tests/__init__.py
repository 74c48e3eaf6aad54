"""Tests of the trainer and of the linter. What must hold before the first of them imports anything
stands here, since pytest imports it before `conftest.py`.
"""

import os
import sys

# Bytecode is kept, here and in every process that a test starts: without it, collecting takes twice
# as long, and every command compiles the framework.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Threads of lanes, and of ranks, would wait for each other in loops that keep processors busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
