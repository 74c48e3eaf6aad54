"""Workarounds for DeepSpeed. Here for its import: MLflow, which only its autotuner uses, takes a
third of the time.
"""

import sys
from typing import Any, cast

_modules = cast(dict[str, Any], sys.modules)
_is_hidden = "mlflow" not in _modules
_modules.setdefault("mlflow", None)  # as if it were not installed
import deepspeed  # noqa: E402, F401

if _is_hidden:
    del _modules["mlflow"]
