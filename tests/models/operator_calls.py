"""Operators that are called within a block, by name: on a GPU, kernels that are launched."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# These only look at memory, or take some.
_VIEWS = {"view", "_unsafe_view", "t", "transpose", "slice", "select", "split", "unsqueeze"}
_VIEWS |= {"split_with_sizes", "squeeze", "expand", "as_strided", "detach", "alias", "unbind"}
_VIEWS |= {"empty", "empty_like", "new_empty", "empty_strided", "permute"}


class Calls(TorchDispatchMode):
    """Counts calls of operators.

    Attributes:
        of: name -> number of calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self) -> dict[str, int]:
        """The calls that compute or move numbers."""
        return {name: count for name, count in self.of.items() if name not in _VIEWS}
