"""Everything that stands on DeepSpeed: engines, checkpoint bytes, process groups."""

import logging

# What torch's extension builder and DeepSpeed remark on every rank without a GPU; the plan has
# named the device.
_REMARKS = ("No CUDA runtime is found", "Setting accelerator to CPU")


def _is_new_warning(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_REMARKS)


for _name in ("torch.utils.cpp_extension", "DeepSpeed"):
    logging.getLogger(_name).addFilter(_is_new_warning)
