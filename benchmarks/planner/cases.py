"""Published points as what the planner estimates: work, parallelism and machine of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from benchmarks.planner.published import read_points, tokens_per_second_per_gpu
from framework.config.model import ModelSection
from framework.config.training import LoRA
from framework.plan.devices import Machine, find_network
from framework.plan.fitted_rates import RATES, Rates
from framework.plan.parallelism import Parallelism
from framework.plan.time import StepTime, step_time
from framework.plan.work import Arithmetic, ModelWork, model_work
from framework.recipes.image_models.kinds import ResNet50
from framework.recipes.language_models.kinds import BERT, GPT

Point = dict[str, Any]
# A bare name means the most common size; an A100 of 40 GB and a GH200 of 96 are in `device_gb`.
DEVICES: Final = {
    "A100": "a100-80gb",
    "H100": "h100-80gb",
    "H200": "h200-141gb",
    "B200": "b200-180gb",
    "MI300X": "mi300x-192gb",
    "GH200": "gh200-96gb",
    "A800": "a100-80gb",
    "V100": "v100-32gb",
}
# Unusual networks and hosts of sources (`notes` in points.json; the card of the model that
# bigscience trained names 4 Omni-Path links for 8 GPUs).
# InternLM prints 4 x 100 Gb for 8 GPUs, as AWS has them.
_NETWORKS: Final = {"bigscience-tr11": "omni-path", "internlm": "aws-efa-p4d"}
_DEVICES_PER_HOST: Final = {"lsaie": 4}
# Share of the forward pass that runs again. Selective, of torchtitan: every second matrix product.
# Numbers as products take them, and the type of the products.
_ARITHMETIC: Final[Mapping[str, tuple[Arithmetic, str]]] = {
    "bf16": ("half", "bf16"),
    "fp16": ("half", "fp16"),
    "amp": ("autocast", "fp16"),
    "tf32": ("fp32", "tf32"),
    "fp32": ("fp32", "fp32"),
}
# Modules of a block that get adapters where all linear layers do.
_LINEAR: Final = ["query", "key", "value", "output", "gate", "up", "down"]
_KINDS: Final = ("gpt", "llama", "bert", "resnet50")
_RECOMPUTED: Final = {"none": 0.0, "selective": 0.5, "full": 1.0}


def speed(point: Point) -> float | None:
    """Return the samples per second of one device, or None if they are not known.

    If no batch is printed, a step is one micro-batch, the default of frameworks.
    """
    tokens_per_second = tokens_per_second_per_gpu(point)
    micro_batch = point["micro_batch"]
    sequence = point["sequence"]
    step_seconds = point["step_seconds"]
    if point["samples_per_second"] is not None and point["num_gpus"] is not None:
        return float(point["samples_per_second"] / point["num_gpus"])
    if tokens_per_second is not None and sequence:
        return tokens_per_second / float(sequence)
    if point["global_batch"] or point["accumulation"]:
        return None
    if None in (micro_batch, sequence, step_seconds):
        return None
    if not {point["tensor"], point["pipeline"], point["sequence_parallel"]} <= {None, 1}:
        return None
    return float(micro_batch / step_seconds)


def vocabulary(point: Point) -> int | None:
    """Return the size of the model's vocabulary, or None.

    If it is not printed, it is computed from the printed number of parameters: those outside the
    blocks are two matrices of the vocabulary.
    """
    model = point["model"]
    if model["vocab"] is not None:
        return int(model["vocab"])
    if None in (model["layers"], model["hidden"], point["parameters"]):
        return None
    blocks = 12 * model["layers"] * model["hidden"] ** 2
    return round((point["parameters"] - blocks) / model["hidden"] / 2)


def left_out(point: Point) -> str | None:
    """Return why a point's throughput is not compared, or None; its fields decide."""
    model = point["model"]
    note = point["note"] or ""
    shape = (model["layers"], model["hidden"], model["heads"], vocabulary(point))
    size = (point["num_gpus"], point["micro_batch"], point["sequence"])
    if model["kind"] == "resnet50":  # a name that leaves nothing open
        shape = (50,)
        size = (point["num_gpus"], point["micro_batch"])
    reasons = {
        "no throughput printed": speed(point) is None,
        "no kind of model that is estimated": model["kind"] not in _KINDS,
        "shape of the model not printed": None in shape,
        "precision not modelled or not printed": point["precision"] not in _ARITHMETIC,
        "device not printed or not listed": point["device"] not in DEVICES,
        "size of the run not printed": None in size,
        "compiled": "compile" in note.lower(),
        "power limited": "power limited" in note,
        "deterministic mode": "deterministic" in note,
        "optimizer state in bf16": "optimizer states" in note,
        "context parallelism, which is not DeepSpeed's": (point["sequence_parallel"] or 1) > 1,
        "offloaded, bandwidth of the host not printed": point["offload"] not in (None, "none"),
    }
    return first_reason(reasons)


def first_reason(reasons: Mapping[str, bool]) -> str | None:
    for reason, applies in reasons.items():
        if applies:
            return reason
    return None


def recompute_of(point: Point) -> str:
    """Return the activations that are computed again: none, selective or full.

    If the source leaves it open, its own TFLOP/s decide: Megatron's formula (Narayanan et al. 2021)
    counts 4 passes with recomputation and 3 without. Else it is none, every framework's default.
    """
    printed = re.search(r"([\d.]+) TFLOP/s as printed", point["note"] or "")
    if point["recompute"] != "unknown" or not printed or point["step_seconds"] is None:
        return str(point["recompute"] or "none").replace("unknown", "none")
    model = point["model"]
    length = point["sequence"]
    hidden = model["hidden"]
    layers = model["layers"]
    pass_flops = 24 * point["global_batch"] * length * layers * hidden**2
    pass_flops *= 1 + length / (6 * hidden) + model["vocab"] / (16 * layers * hidden)
    passes = float(printed[1]) * 1e12 * point["step_seconds"] * point["num_gpus"] / pass_flops
    return "full" if passes > 3.5 else "none"


def config_of(point: Point) -> GPT:
    """Return the section of a run config for the point's model."""
    model = point["model"]
    is_llama = model["kind"] == "llama"
    is_mosaic = point["source"]["name"] == "llm-foundry"
    kv_heads = model["kv_heads"] or model["heads"]
    perceptron = model["ffn"] or 4 * model["hidden"]
    if is_llama and model["ffn"] is None:  # the printed number of parameters leaves one width
        attention = 2 * model["hidden"] ** 2 * (1 + kv_heads / model["heads"])
        block = point["parameters"] / model["layers"]
        perceptron = round((block - attention) / 3 / model["hidden"])
    return GPT(
        num_layers=model["layers"],
        hidden_size=model["hidden"],
        num_heads=model["heads"],
        num_kv_heads=kv_heads,
        mlp_size=perceptron,
        vocab_size=vocabulary(point),
        max_positions=point["sequence"],
        dropout=0.0,
        positions="rotary" if is_llama else "learned",
        norm="rmsnorm" if is_llama else "layernorm",
        mlp="swiglu" if is_llama else "gelu",
        bias=not (is_llama or is_mosaic),
        tie_embeddings=not is_llama,
    )


def section_of(point: Point) -> ModelSection:
    """Return the section of a run config for the point's model, of any kind."""
    model = point["model"]
    if model["kind"] == "resnet50":
        return ResNet50(in_channels=3, num_classes=1000)
    if model["kind"] == "bert":
        return BERT(
            num_layers=model["layers"],
            hidden_size=model["hidden"],
            num_heads=model["heads"],
            mlp_size=model["ffn"],
            vocab_size=model["vocab"],
            max_positions=512,
            num_types=2,
        )
    return config_of(point)


def work_of(point: Point, micro_size: int = 1) -> ModelWork:
    """Return the work of the point's model."""
    model = point["model"]
    lora = None
    if model.get("lora_r"):
        lora = LoRA(target_modules=_LINEAR, r=model["lora_r"])
    work = model_work(
        section_of(point),
        micro_size=micro_size,
        sequence_length=point["sequence"],
        image_size=224,
        arithmetic=_ARITHMETIC[point["precision"]][0],
        lora=lora,
    )
    assert work is not None
    if writes_scores(point):
        work = with_scores(work, micro_size * model["heads"] * point["sequence"] ** 2)
    return work


def writes_scores(point: Point) -> bool:
    """Whether attention is computed step by step, all of its scores written to memory, as before
    FlashAttention; our own never is.
    """
    source = point["source"]
    is_old = source["framework"] == "Megatron-DeepSpeed"
    return is_old or source.get("attention") == "written"


def with_scores(work: ModelWork, scores: int) -> ModelWork:
    """Return the work with attention that writes all of its scores to memory, as before
    FlashAttention (Dao et al. 2022): two products, a fused softmax and a dropout read and write
    them in half precision, and three tensors of scores are saved.
    """
    moved_bytes = (2 + 4 + 5 + 2) * scores
    saved_bytes = 5 * scores
    parts = []
    for part in work.parts:
        if part.count > 1:
            part = replace(
                part,
                masked_flops=0,
                score_flops=part.score_flops + part.masked_flops,
                moved_bytes=part.moved_bytes + moved_bytes,
                saved_bytes=part.saved_bytes + saved_bytes,
                split_bytes=part.split_bytes + saved_bytes,
            )
        parts.append(part)
    return replace(work, parts=tuple(parts))


def bucket_of(point: Point) -> int:
    """Return the elements of DeepSpeed's buckets, from the source's notes or else the default."""
    printed = re.search(r"buckets of (\d+e\d+)", point["source"].get("notes", ""))
    if printed:
        return int(float(printed[1]))
    return 500_000_000


def parallelism_of(point: Point) -> Parallelism:
    """Return the distribution of the point's step."""
    tensor = point["tensor"] or 1
    pipe = point["pipeline"] or 1
    data = point["num_gpus"] // tensor // pipe
    stage = 0
    if (point["strategy"] or "ddp") != "ddp":
        stage = int(point["strategy"][-1])
    accumulation = point["accumulation"]
    if accumulation is None:
        accumulation = max((point["global_batch"] or 0) // (point["micro_batch"] * data), 1)
    is_fsdp = "DeepSpeed" not in point["source"]["framework"] and stage > 1
    # llm-foundry's DEFAULT sums in fp32, PURE does not; bigscience does if it trains in bf16
    # (`notes`).
    is_bigscience = point["source"]["name"] == "bigscience-tr11"
    sums_in_fp32 = "DEFAULT" in (point["note"] or "")
    if is_bigscience and point["precision"] == "bf16":
        sums_in_fp32 = True
    is_half = _ARITHMETIC[point["precision"]][0] == "half"
    if not is_half and point["source"]["name"] != "nvidia-bert":  # which sums in fp16 (`notes`)
        sums_in_fp32 = True
    bucket = bucket_of(point)
    prefetch = 50_000_000
    if is_fsdp:  # blocks are summed and gathered
        bucket = prefetch = 12 * point["model"]["hidden"] ** 2
    return Parallelism(
        data=data,
        pipe=pipe,
        tensor=tensor,
        zero_stage=3
        if is_fsdp
        else stage,  # FSDP's SHARD_GRAD_OP is stage 3 that keeps the weights
        accumulation=accumulation,
        micro_size=point["micro_batch"],
        dtype=_ARITHMETIC[point["precision"]][1],
        weight_bytes=2 if is_half else 4,
        gradient_bytes=4 if sums_in_fp32 else 2,
        state_bytes=12 if is_half else 8,
        recomputed=_RECOMPUTED[recompute_of(point)],
        bucket=bucket,
        prefetch=prefetch,
        persistent=0 if is_fsdp else 100_000,
        reuse=10**12 if is_fsdp else 10**9,
        overlaps=is_fsdp or stage in (0, 3) or point["source"].get("overlaps", False),
        scatters=is_fsdp or stage == 3,
        live=0 if stage == 3 else 10**12,
        by_weight=not is_fsdp,
        interleaving=point["virtual_pipeline"] or 1,
        block_sums=(2, 2),
    )


def machine_of(point: Point) -> Machine:
    """Return the machine of the point."""
    name = DEVICES[point["device"]]
    if point["device_gb"] == 40:
        name = "a100-40gb"
    source = point["source"]["name"]
    if source in _DEVICES_PER_HOST:
        devices_per_host = _DEVICES_PER_HOST[source]
    elif point["nodes"]:
        devices_per_host = point["num_gpus"] // point["nodes"]
    else:
        devices_per_host = 8
    machine = Machine.listed(name, devices_per_host=devices_per_host)
    if source in _NETWORKS:
        machine = replace(machine, network=find_network(_NETWORKS[source]))
    if (point["device"], point["device_gb"]) == ("H100", 96):  # 2.4 TB/s (notes of the source)
        machine = replace(machine, device=replace(machine.device, memory_bytes_per_second=2.4e12))
    if point["device"] == "A800":  # NVLink of 400 GB/s, of 600 of an A100
        links = {"link_bytes_per_second": 2e11, "collective_bytes_per_second": 1.6e11}
        machine = replace(machine, device=replace(machine.device, **links))
    return machine


@dataclass(frozen=True)
class Case:
    """A point that is compared, with `measured` in samples per second of one device."""

    point: Point
    work: ModelWork
    parallelism: Parallelism
    machine: Machine
    measured: float

    def time(self, rates: Rates = RATES) -> StepTime:
        """Return the estimate."""
        return step_time(self.work, self.parallelism, self.machine, rates)

    def ratio(self, rates: Rates = RATES) -> float:
        """Return the estimated throughput divided by the measured one."""
        found = self.time(rates)
        return found.samples_per_second / found.num_devices / self.measured


@cache
def cases(split: str | None = None) -> list[Case]:
    """Return the points of one half that are compared, or all."""
    compared = []
    for point in read_points(split):
        if left_out(point) is None:
            measured = speed(point)
            assert measured is not None
            compared.append(
                Case(
                    point,
                    work_of(point, point["micro_batch"]),
                    parallelism_of(point),
                    machine_of(point),
                    measured,
                )
            )
    return compared
