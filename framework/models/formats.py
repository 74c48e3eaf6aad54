"""Formats of tensors: images with their channels last in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def channels_last(images: Tensor) -> Tensor:
    """Return images (batch, channels, height, width) with the channels last in memory.

    Convolutions give their output the order of their input. They read it from the strides. Images
    with a single channel are contiguous in both orders, and torch then leaves the strides as they
    are; so they are set here.
    """
    images = images.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = images.shape
    if channels > 1:
        return images
    return images.as_strided(images.shape, (height * width, 1, width, 1))
