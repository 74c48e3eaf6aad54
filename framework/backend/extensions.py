"""Tells torch where DeepSpeed's compiled ops are kept: `framework.ds_json.ops` says where and why."""

from __future__ import annotations

import os

import torch

from framework.ds_json.ops import extensions_folder


def use_own_cache() -> None:
    """Set TORCH_EXTENSIONS_DIR for this process, unless the user has."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder(os.environ, torch_version=torch.__version__))
