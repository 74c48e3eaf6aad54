"""Messages of memory that was not there, from public issues: shortened to the frames that matter,
with shorter paths; what an issue cuts off is completed in the form of its release.
"""

from __future__ import annotations

from typing import Final

_PYTHON: Final = "/opt/conda/lib/python3.10/site-packages"
_CUDA_NOTES: Final = "  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"

TEXTS: Final[dict[str, str]] = {
    # hiyouga/LlamaFactory #7532: ZeRO-3 with offload, 48 devices
    "step-zero3": f"""\
  File "{_PYTHON}/transformers/trainer.py", line 2279, in _inner_training_loop
  File "{_PYTHON}/deepspeed/runtime/engine.py", line 2213, in step
    self._take_model_step(lr_kwargs)
  File "{_PYTHON}/deepspeed/runtime/zero/stage3.py", line 947, in _optimizer_step
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.39 GiB. GPU 1 has a total capacity of 79.32 GiB \
of which 2.40 GiB is free. Process 105400 has 76.92 GiB memory in use. Of the allocated memory 73.28 GiB is \
allocated by PyTorch, and 1.59 GiB is reserved by PyTorch but unallocated. {_CUDA_NOTES}
    self._optimizer_step(sub_group_id)
""",
    # huggingface/trl #2776 (a comment): torch's AdamW, several tensors at once
    "step-adamw": f"""\
[rank0]: Traceback (most recent call last):
[rank0]:   File "{_PYTHON}/torch/optim/optimizer.py", line 91, in _use_grad
[rank0]:     ret = func(self, *args, **kwargs)
[rank0]:   File "{_PYTHON}/torch/optim/adamw.py", line 220, in step
[rank0]:     adamw(
[rank0]:   File "{_PYTHON}/torch/optim/adamw.py", line 606, in _multi_tensor_adamw
[rank0]:     exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has a total capacity of \
94.99 GiB of which 87.19 MiB is free. Including non-PyTorch memory, this process has 94.90 GiB memory in use.
""",
    # jzhang38/EasyContext #11: ZeRO-3, sequences of 700,000 tokens
    "backward-zero3": f"""\
[rank1]: Traceback (most recent call last):
[rank1]:   File "{_PYTHON}/accelerate/utils/deepspeed.py", line 166, in backward
[rank1]:     self.engine.backward(loss, **kwargs)
[rank1]:   File "{_PYTHON}/deepspeed/utils/nvtx.py", line 15, in wrapped_fn
[rank1]:     ret_val = func(*args, **kwargs)
[rank1]:   File "{_PYTHON}/deepspeed/runtime/engine.py", line 1976, in backward
[rank1]:     self.optimizer.backward(loss, retain_graph=retain_graph)
[rank1]:   File "{_PYTHON}/deepspeed/runtime/zero/stage3.py", line 2213, in backward
[rank1]:     self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
[rank1]:   File "{_PYTHON}/torch/utils/checkpoint.py", line 1129, in unpack_hook
[rank1]:   File "{_PYTHON}/torch/nn/modules/module.py", line 1532, in _wrapped_call_impl
[rank1]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.67 GiB. GPU 1 has a total capacity of \
79.15 GiB of which 1.10 GiB is free.
""",
    # LianjiaTech/BELLE #257: the loss, torch 2.0
    "loss": f"""\
  File "{_PYTHON}/torch/nn/modules/module.py", line 1501, in _call_impl
    return forward_call(*args, **kwargs)
  File "{_PYTHON}/torch/nn/functional.py", line 3029, in cross_entropy
    return torch._C._nn.cross_entropy_loss(input, target, weight, _Reduction.get_enum(reduction))
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.14 GiB (GPU 1; 39.41 GiB total capacity; 26.21 \
GiB already allocated; 5.86 GiB free; 31.99 GiB reserved in total by PyTorch) If reserved memory is >> allocated \
memory try setting max_split_size_mb to avoid fragmentation.
""",
    # deepspeedai/DeepSpeed #6737: the whole model goes to the device first
    "initialize": f"""\
worker-5: [rank22]: Traceback (most recent call last):
worker-5: [rank22]:   File "/data/main_new.py", line 242, in train
worker-5: [rank22]:     model_engine_combined, optimizer, _, _ = deepspeed.initialize(args=args, model=combined_model,
worker-5: [rank22]:   File "{_PYTHON}/deepspeed/__init__.py", line 181, in initialize
worker-5: [rank22]:     engine = DeepSpeedEngine(args=args,
worker-5: [rank22]:   File "{_PYTHON}/deepspeed/runtime/engine.py", line 1103, in _configure_distributed_model
worker-5: [rank22]:     self.module.to(self.device)
worker-5: [rank22]:   File "{_PYTHON}/torch/nn/modules/module.py", line 1174, in to
worker-5: [rank22]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 6 has a total \
capacity of 79.15 GiB of which 50.44 MiB is free. Process 1 has 79.09 GiB memory in use.
""",
    # deepspeedai/DeepSpeed #237: torch 1.x; the optimizer's state is made within initialize
    "initialize-state": """\
Traceback (most recent call last):
  File "/opt/conda/envs/python3.6/lib/python3.6/site-packages/deepspeed/__init__.py", line 98, in initialize
    config_params=config_params)
  File "/opt/conda/envs/python3.6/lib/python3.6/site-packages/deepspeed/pt/deepspeed_zero_optimizer.py", line 333, in \
__init__
    self.initialize_optimizer_states()
  File "/opt/conda/envs/python3.6/lib/python3.6/site-packages/deepspeed/pt/deepspeed_zero_optimizer.py", line 357, in \
initialize_optimizer_states
    self.optimizer.step()
RuntimeError: CUDA out of memory. Tried to allocate 8.52 GiB (GPU 0; 31.72 GiB total capacity; 25.59 GiB already \
allocated; 5.39 GiB free; 14.59 MiB cached)
""",
    # huggingface/peft #1703: NCCL cannot connect, within initialize
    "nccl": f"""\
Traceback (most recent call last):
  File "{_PYTHON}/deepspeed/__init__.py", line 181, in initialize
    engine = DeepSpeedEngine(args=args,
  File "{_PYTHON}/deepspeed/runtime/engine.py", line 262, in __init__
    self._configure_distributed_model(model)
torch.distributed.DistBackendError: NCCL error in: /work/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, \
unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'
""",
    # NVIDIA/nccl #1235
    "nccl-log": """\
ng30903:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'

ng30903:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes
""",
    # NVIDIA/DeepLearningExamples #1386: /dev/shm
    "shared": f"""\
[rank2]:   File "{_PYTHON}/deepspeed/comm/torch.py", line 185, in broadcast
[rank2]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
[rank2]: Last error:
[rank2]: Error while creating shared memory segment /dev/shm/nccl-c8G2vd (size 5767520)
""",
    # OptimalScale/LMFlow #90
    "host": """\
RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to \
allocate 4009910272 bytes. Error code 12 (Cannot allocate memory)
""",
    # deepspeedai/DeepSpeed #3232: DeepSpeed's launcher
    "killed-deepspeed": """\
[2023-04-14 13:11:27,879] [INFO] [launch.py:428:sigkill_handler] Killing subprocess 13266
[2023-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py', \
'--local_rank=0', '--zero_stage', '2', '--deepspeed'] exits with return code = -9
""",
    # hiyouga/LlamaFactory #9116: torchrun
    "killed-torchrun": """\
E0910 20:18:31.000000 371 site-packages/torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) \
local_rank: 0 (pid: 438) of binary: /opt/conda/bin/python
""",
    # Tianhao-Qi/Mask2DiT #4: almost all of it lies in pieces
    "fragmented": f"""\
CUDA out of memory. Tried to allocate 35.60 GiB. GPU 0 has a total capacity of 79.33 GiB of which 26.16 GiB is free. \
Process 76883 has 53.16 GiB memory in use. Of the allocated memory 11.97 GiB is allocated by PyTorch, and 40.69 GiB is \
reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting \
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.{_CUDA_NOTES}
""",
    # hiyouga/LlamaFactory #1936: each of five ranks holds a context on the first device
    "others": """\
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacty of 23.65 GiB \
of which 93.81 MiB is free. Process 62201 has 398.00 MiB memory in use. Process 62203 has 398.00 MiB memory in use. \
Process 62204 has 398.00 MiB memory in use. Process 62200 has 21.98 GiB memory in use. Process 62202 has 398.00 MiB \
memory in use. Of the allocated memory 21.51 GiB is allocated by PyTorch, and 2.30 MiB is reserved by PyTorch but \
unallocated. If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.
""",
    # ROCm/TheRock #2118: AMD's form, with a limit of the process and pools of graphs
    "hip": """\
torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB of \
which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with 17.00 \
MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated.
""",
    # huggingface/transformers #24658: pinned memory of offloaded weights under WSL, as IPython
    # shows a traceback
    "pinned": f"""\
File {_PYTHON}/deepspeed/runtime/zero/parameter_offload.py:297, in DeepSpeedZeRoOffload._convert_to_zero_parameters(s)
    294 if mpu:
File {_PYTHON}/deepspeed/runtime/zero/partition_parameters.py:1105, in Init._partition_param(self, param)
File {_PYTHON}/deepspeed/accelerator/cuda_accelerator.py:217, in CUDA_Accelerator.pin_memory(self, tensor)
--> 217     return tensor.pin_memory()
RuntimeError: CUDA error: out of memory
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
""",
    # bmaltais/kohya_ss #1048: rich's frames
    "rich": """\
│ /opt/venv/lib/python3.10/site-packages/torch/cuda/amp/grad_scaler.py:290 in _maybe_opt_step          │
│                                                                                                  │
│ ❱ 290 │   │   │   retval = optimizer.step(*args, **kwargs)                                       │
│                                                                                                  │
│ /opt/venv/lib/python3.10/site-packages/torch/optim/adamw.py:161 in step                              │
╰──────────────────────────────────────────────────────────────────────────────────────────────────╯
OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.99 GiB total capacity; 22.83 GiB already \
allocated; 0 bytes free; 23.15 GiB reserved in total by PyTorch)
""",
    # hiyouga/LlamaFactory #1221: ZeRO-2 on eight V100; a line of source, and no frames
    "step-quoted": """\
`denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.14 GiB (GPU 5; 31.75 GiB total capacity; 28.28 \
GiB already allocated; 1.95 GiB free; 28.28 GiB reserved in total by PyTorch) If reserved memory is >> allocated \
memory try setting max_split_size_mb to avoid fragmentation.
""",
    # modelscope/ms-swift #5943: the driver has no memory of the process
    "own-unknown": """\
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 79.15 \
GiB of which 2.65 GiB is free. Including non-PyTorch memory, this process has 0 bytes memory in use. Of the allocated \
memory 48.16 GiB is allocated by PyTorch, and 3.21 GiB is reserved by PyTorch but unallocated.
""",
}
