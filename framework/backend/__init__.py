"""What stands on DeepSpeed: engines, checkpoint bytes, process groups."""

import logging

# torch's extension builder, which DeepSpeed imports on every rank, remarks on nvcc without a GPU; the plan has named the device.
logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime is found" not in record.getMessage())
