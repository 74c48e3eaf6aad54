"""The estimate of a step's time against arithmetic by hand, and what must never make it slower."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.config.load import config_from_values
from framework.config.optimizer import Muon
from framework.plan.cluster import Cluster
from framework.plan.collectives import Collectives
from framework.plan.devices import Device, Machine, Network
from framework.plan.fitted_rates import Rates
from framework.plan.flops import flops_per_step
from framework.plan.memory import NotEstimatedError
from framework.plan.parallelism import Parallelism
from framework.plan.plan import Plan, make_plan
from framework.plan.time import StepTime, estimate_time, step_time
from framework.plan.work import LayerWork, ModelWork, named_work
from tests.places import ROOT

# Nothing saturates, nothing hides, nothing is lost.
IDEAL = Rates(
    plateau=1.0,
    attention=1.0,
    width=0.0,
    memory=1.0,
    overlap=0.0,
    network=1.0,
    best=1.0,
    best_plain=1.0,
    best_tf32=1.0,
    launch_seconds=0.0,
    weight_seconds=0.0,
)
DEVICE = Device(
    "round",
    memory_bytes=10**11,
    flops_per_second={"bf16": 1e14, "fp32": 1e13},
    memory_bytes_per_second=1e12,
    collective_bytes_per_second=1e11,
    host_bytes_per_second=2e10,
    host_memory_bytes_per_second=2e11,
)
MACHINE = Machine(DEVICE, Network("round", 1e10, 1e-5), devices_per_host=8)
# 1,000 tokens of a sample pass 8 blocks of 1e8 weights each, and a head of 5e7.
BLOCK = LayerWork(
    "blocks.{}", 10**8, 2 * 10**11, 4 * 10**8, 10**8, 5 * 10**7, 10**7, 2 * 10**6, count=8
)
HEAD = LayerWork("head", 5 * 10**7, 10**11, 0, 10**6, 0, 10**6, 10**8)
LOSS = LayerWork("loss", 0, 0, 10**8, 10**6, 0, 10**6, 4)
WORK = ModelWork({}, 0, (BLOCK, HEAD, LOSS), num_samples=1, num_tokens=1000)
PARAMS = 8 * 10**8 + 5 * 10**7


def seconds(machine: Machine = MACHINE, rates: Rates = IDEAL, **by: Any) -> dict[str, float]:
    return dict(step_time(WORK, Parallelism(**by), machine, rates).seconds)


def test_a_single_device_computes_and_updates() -> None:
    found = seconds(micro_size=2, accumulation=3)
    assert found["compute"] == pytest.approx(3 * 2 * 3 * (8 * 2e11 + 1e11) / 1e14)
    assert found["memory-bound operations"] == pytest.approx(3 * 2 * 2 * (8 * 4e8 + 1e8) / 1e12)
    assert found["copies"] == pytest.approx(3 * 3 * 2 * PARAMS / 1e12)
    # gradients of 2 bytes and their copies of 4 are read, 12 bytes of state read and written, 2 of
    # weights written
    assert found["optimizer"] == pytest.approx(PARAMS * (2 * 12 + 4 + 2 * 2 + 2) / 1e12)
    assert found.keys() == {"compute", "memory-bound operations", "copies", "optimizer"}


def test_muon_makes_matrices_orthogonal_and_exchanges_them() -> None:
    weights = {f"blocks.{number}.mlp.weight": (1000, 4000) for number in range(16)}
    work = replace(WORK, weights={"embed.weight": (500, 1000), **weights})

    def seconds_of(**by: Any) -> dict[str, float]:
        return dict(step_time(work, Parallelism(muon=Muon(), **by), MACHINE, IDEAL).seconds)

    # five iterations of three products: n x m with itself, n x n with itself, n x n with n x m
    each = 5 * (2 * 1e6 * 4e3 + 2 * 1e9 + 2 * 1e6 * 4e3) / 1e14
    assert seconds_of()["orthogonal matrices"] == pytest.approx(16 * each)
    assert seconds_of(data=8)["orthogonal matrices"] == pytest.approx(16 * each)
    assert "matrix exchange" not in seconds_of(data=8)
    cut = seconds_of(data=8, zero_stage=3)
    assert cut["orthogonal matrices"] == pytest.approx(2 * each)
    # there and back, in bf16, without what stays: 7/8
    assert cut["matrix exchange"] == pytest.approx(2 * 7 / 8 * 2 * 64e6 / 1e11, abs=1e-4)
    assert seconds_of(data=8, zero_stage=2)["matrix exchange"] < cut["matrix exchange"] / 2
    assert seconds_of(data=32, zero_stage=2)["orthogonal matrices"] == pytest.approx(each)


def test_recomputation_is_a_third_pass_of_all_but_the_loss() -> None:
    kept, again = seconds(), seconds(recomputed=1.0)
    assert again["compute"] == pytest.approx(kept["compute"] * 4 / 3)
    more = again["memory-bound operations"] - kept["memory-bound operations"]
    assert more == pytest.approx(8 * 4e8 / 1e12)
    selective = seconds(recomputed=1.0, keeps_products=True)
    assert selective == pytest.approx(again | {"compute": kept["compute"]})


def test_blocks_in_fp8_have_its_rate_and_their_operands_are_rounded() -> None:
    device = replace(DEVICE, flops_per_second={"bf16": 1e14, "fp8": 2e14})
    block = replace(BLOCK, product_bytes=2 * 10**6)
    work = replace(WORK, parts=(block, HEAD, LOSS))
    by = Parallelism(rounding_bytes=5)
    found = step_time(work, by, replace(MACHINE, device=device), IDEAL).seconds
    assert found["compute"] == pytest.approx(3 * (8 * 2e11 / 2 + 1e11) / 1e14)
    # forward inputs and weights; backward those and gradients of outputs
    numbers = 8 * (3 * 10**6 + 2 * 10**8)
    assert found["rounding to fp8"] == pytest.approx(5 * numbers / 1e12)
    again = step_time(
        work,
        replace(by, recomputed=1.0, keeps_products=True),
        replace(MACHINE, device=device),
        IDEAL,
    )
    assert again.seconds["rounding to fp8"] == pytest.approx(5 * (numbers + 8 * 1.01e8) / 1e12)
    with pytest.raises(NotEstimatedError, match="peak in fp8"):
        step_time(work, by, MACHINE, IDEAL)


def test_rates_of_a_step() -> None:
    found = step_time(WORK, Parallelism(data=2, accumulation=5, micro_size=3), MACHINE, IDEAL)
    assert (found.num_samples, found.num_tokens, found.num_devices) == (30, 30_000, 2)
    assert found.samples_per_second == pytest.approx(30 / found.total)
    assert found.tokens_per_second_per_device == pytest.approx(15_000 / found.total)
    assert found.mfu == pytest.approx(3 * 30 * 1.7e12 / (2 * 1e14 * found.total))
    assert found.to_dict()["is_estimate"] is True
    assert found.to_dict()["seconds"] == found.seconds


@pytest.mark.parametrize(
    ("stage", "accumulation", "sums", "gathers"),
    [
        (0, 4, 2, 0),  # one all-reduce a step
        (1, 4, 2, 1),  # the same, and weights are gathered
        (2, 4, 4 * 2, 1),  # one for every micro-batch
        # its part of the sums; weights for the forward and for the backward pass
        (3, 4, 4 * 1, 4 * 2),
    ],
)
def test_stages_send_what_deepspeed_sends(
    stage: int, accumulation: int, sums: int, gathers: int
) -> None:
    """In multiples of the weights' bytes, times 7/8 on 8 ranks (capabilities of DeepSpeed 0.19.8,
    not of the paper).
    """
    options = {"zero_stage": stage, "accumulation": accumulation, "scatters": stage == 3, "live": 0}
    found = seconds(data=8, overlaps=False, prefetch=0, **options)
    once = 7 / 8 * 2 * PARAMS / 1e11
    # starts of the buckets come on top
    assert found["gradient sums"] == pytest.approx(sums * once, rel=0.08)
    assert found.get("weight gathers", 0.0) == pytest.approx(gathers * once, rel=0.08)


def test_models_below_the_live_limit_stay_gathered_for_the_backward_pass() -> None:
    freed, stays = (
        seconds(data=8, zero_stage=3, live=live)["weight gathers"] for live in (0, 10**9)
    )
    assert freed == pytest.approx(2 * stays)


def test_experts_are_summed_and_gathered_by_the_ranks_that_hold_the_same_ones() -> None:
    shapes = {
        f"blocks.{block}.mlp.experts.{n}.up": (10**4, 10**4) for block in (0, 1) for n in range(4)
    }
    work = replace(WORK, weights={"embed.weight": (10**4, 10**4), **shapes})
    for stage in (0, 1, 2):
        by = Parallelism(data=8, expert=4, zero_stage=stage, overlaps=False)
        found = step_time(work, by, MACHINE, IDEAL).seconds
        # of 9e8 elements a rank has the first and two more, which two ranks hold
        dense, experts = 2 * 1e8 / 1e11, 2 * 2e8 / 1e11
        sent = 7 / 8 * dense + 1 / 2 * experts
        assert found["gradient sums"] == pytest.approx(2 * sent, rel=0.03)
        assert found.get("weight gathers", sent) == pytest.approx(sent, rel=0.03)
        share = 3e8 if stage == 0 else 1e8 / 8 + 2e8 / 2
        assert found["optimizer"] == pytest.approx(share * 34 / 1e12)


def test_a_recomputed_layer_is_gathered_again_where_its_weights_were_let_go() -> None:
    by = {"data": 8, "zero_stage": 3, "live": 0, "prefetch": 0, "recomputed": 1.0}
    # forward, and backward of a block that is run again: 2e8 elements from one use to the next
    stays, goes = (seconds(reuse=reuse, **by)["weight gathers"] for reuse in (2 * 10**8, 10**8))
    assert goes / stays == pytest.approx(2.5 / 2)


CHANGES = {
    1: {
        "reduce_bucket_size": (10**6, {"gradient sums"}),
        "allgather_bucket_size": (10**6, set()),
        "stage3_prefetch_bucket_size": (10**6, set()),
        "stage3_param_persistence_threshold": (0, set()),
    },
    3: {
        "reduce_bucket_size": (10**6, {"gradient sums"}),
        "allgather_bucket_size": (10**6, set()),
        "stage3_prefetch_bucket_size": (10**6, {"weight gathers"}),
        "stage3_param_persistence_threshold": (10**7, {"weight gathers"}),
        # weights that are gathered once more are copied once more, too
        "stage3_max_live_parameters": (10**6, {"weight gathers", "copies"}),
    },
}


@pytest.mark.parametrize(
    ("stage", "key"),
    [(stage, key) for stage in (1, 2, 3) for key in CHANGES[3 if stage == 3 else 1]],
)
def test_each_bucket_changes_its_own_component_alone(stage: int, key: str) -> None:
    value, expected = CHANGES[3 if stage == 3 else 1][key]
    found = []
    for more in ({}, {key: value}):
        machine = replace(Machine.listed("a100-80gb"), devices_per_host=4)
        found.append(planned(8, machine, zero={"stage": stage, **more})[0].seconds)
    before, after = found
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == expected


def test_more_devices_make_a_fixed_batch_faster_at_stage_3() -> None:
    """As measured with 175 billion weights on 384 to 1,536 A100 (benchmarks/planner/points.json,
    narayanan-2021).
    """
    times = []
    for hosts, micro in ((48, 4), (96, 2), (192, 1)):
        model = {"kind": "gpt", "hidden_size": 12288, "num_layers": 96, "num_heads": 96}
        config = config_from_values(
            {
                "model": model | {"vocab_size": 51200, "max_positions": 2048, "dropout": 0.0},
                "data": {"kind": "text", "sequence_length": 2048},
                "task": {"kind": "causal_lm"},
                "batch": {"micro_size": micro},
                "precision": {"dtype": "bf16"},
                "zero": {"stage": 3},
                "training": {"max_steps": 10, "recompute_every": 1},
            }
        )
        plan = make_plan(config, Cluster(devices_per_host=8, num_hosts=hosts))
        work = named_work(config, 1)
        assert work is not None
        times.append(estimate_time(plan, work, Machine.listed("a100-80gb")).total)
    assert times[0] > times[1] > times[2]


def test_frozen_weights_are_gathered_and_never_summed() -> None:
    frozen = replace(WORK, frozen={"old.weight": (1000, 850_000)})  # as many as are trained
    by = Parallelism(data=8, zero_stage=3, live=0, prefetch=0, overlaps=False, scatters=True)
    own, more = (step_time(work, by, MACHINE, IDEAL).seconds for work in (WORK, frozen))
    assert more["weight gathers"] == pytest.approx(2 * own["weight gathers"], rel=0.02)
    assert (more["gradient sums"], more["optimizer"]) == (own["gradient sums"], own["optimizer"])


def test_at_stage_3_the_host_handles_each_weight() -> None:
    many = replace(WORK, weights={f"w{number}": (1,) for number in range(100)})
    rates, by = (
        replace(IDEAL, weight_seconds=1.0),
        Parallelism(zero_stage=3, accumulation=3, recomputed=1.0),
    )
    found = step_time(many, by, MACHINE, rates).seconds
    device = found["compute"] + found["memory-bound operations"]
    # it works beside the device
    assert found["host work of stage 3"] == pytest.approx(3 * 300 - device)
    for other in (replace(by, by_weight=False), replace(by, zero_stage=2)):
        assert "host work of stage 3" not in step_time(many, other, MACHINE, rates).seconds
    slow = replace(MACHINE, device=replace(DEVICE, flops_per_second={"bf16": 1e9}))
    assert "host work of stage 3" not in step_time(many, by, slow, rates).seconds


def test_between_hosts_the_network_decides_and_all_its_links_help() -> None:
    inside, outside = seconds(data=8)["gradient sums"], seconds(data=16)["gradient sums"]
    assert outside / inside == pytest.approx((15 / 16 / 8e10) / (7 / 8 / 1e11), rel=0.05)
    # With tensor parallelism of 8 each rank of a host has another group, and one link for it.
    alone = seconds(data=2, tensor=8)["gradient sums"]
    assert alone == pytest.approx(2 * 0.5 * 2 * PARAMS / 8 / 1e10, rel=0.05)


def test_sums_hide_behind_the_backward_pass_but_for_the_last_bucket() -> None:
    rates = replace(IDEAL, overlap=1.0)
    shown, hidden = (
        seconds(rates=rates, data=8, micro_size=8, overlaps=each)["gradient sums"]
        for each in (0, 1)
    )
    assert hidden == pytest.approx(shown / 9)  # nine weights, each larger than a bucket
    by = {"data": 8, "micro_size": 8, "zero_stage": 1, "bucket": 10**9}
    one, alone = (seconds(rates=rates, overlaps=each, **by)["gradient sums"] for each in (1, 0))
    assert one == alone


def test_a_pipeline_waits_for_its_first_and_last_micro_batch() -> None:
    found = step_time(WORK, Parallelism(pipe=4, accumulation=8), MACHINE, IDEAL)
    passes = sum(
        found.seconds[name] for name in ("compute", "memory-bound operations", "pipeline sends")
    )
    assert found.seconds["pipeline bubble"] == pytest.approx(passes * 3 / 8)
    twice = step_time(WORK, Parallelism(pipe=4, accumulation=8, interleaving=2), MACHINE, IDEAL)
    assert twice.seconds["pipeline bubble"] < 0.52 * found.seconds["pipeline bubble"]
    # 8.5 parts like a block on 4 stages: the fullest has 2 of them and the head
    assert found.seconds["compute"] == pytest.approx(8 * 3 * (2 * 2e11 + 1e11) / 1e14)


def test_tensor_parallelism_splits_products_and_sums_twice_a_pass() -> None:
    found = seconds(tensor=8, block_sums=(2, 2))
    assert found["compute"] == pytest.approx(seconds()["compute"] / 8)
    # NCCL's protocol of small messages: a later start, shorter steps, and 0.92 of the bandwidth
    assert found["tensor parallel"] == pytest.approx(
        8 * 4 * (14e-6 + 2 * 7 * 1.9e-6 + 2 * 7 / 8 * 2e6 / 1e11 / 0.92)
    )
    # half of what a block saves is split, and its loss; the other half each rank moves whole
    moved = 2 * (8 * 4e8 * (0.5 + 0.5 / 8) + 1e8 / 8) / 1e12
    assert found["memory-bound operations"] == pytest.approx(moved, rel=1e-2)


def test_collectives_follow_the_links() -> None:
    """The protocol of large messages over NVLink and over PCIe; the switch of a host adds up."""
    size = 1e9
    ring = 8.4e-6 + 14 * 3.4e-6 + 2 * 7 / 8 * size / 1e11
    assert Collectives(MACHINE, 1.0).all_reduce(size, 8, 1) == pytest.approx(ring)
    pcie = replace(MACHINE, device=replace(DEVICE, link_bytes_per_second=3e10))
    over_pcie = 8.4e-6 + 14 * 5.7e-6 + 2 * 7 / 8 * size / 1e11
    assert Collectives(pcie, 1.0).all_reduce(size, 8, 1) == pytest.approx(over_pcie)
    hopper = replace(MACHINE, device=replace(DEVICE, capability=(9, 0)))
    found = Collectives(hopper, 1.0)
    assert found.all_reduce(size, 8, 1) == pytest.approx(ring, rel=0.3)
    assert found.all_reduce(size, 8, 1) < ring / 1.25
    assert found.all_reduce(size, 4, 1) == Collectives(MACHINE, 1.0).all_reduce(size, 4, 1)
    assert found.scatter(size, 8, 1) == Collectives(MACHINE, 1.0).scatter(size, 8, 1)
    measured = replace(hopper, measured=frozenset({"collective_bytes_per_second"}))
    assert Collectives(measured, 1.0).all_reduce(size, 8, 1) == pytest.approx(ring)


def test_sequence_and_expert_parallelism_exchange_values() -> None:
    found = seconds(data=4, sequence=2, expert=4)
    assert found["sequence parallel"] == pytest.approx(8 * 8 * (8.4e-6 + 3.4e-6 + 0.5 * 1e6 / 1e11))
    assert found["expert parallel"] == pytest.approx(
        8 * 4 * (8.4e-6 + 3 * 3.4e-6 + 3 / 4 * 1e6 / 1e11)
    )


def test_a_ring_sends_keys_and_their_gradients_beside_its_scores() -> None:
    found = seconds(sequence=4, ring=2, key_share=0.5)
    start = 8.4e-6
    output = 0.5e6  # bytes of a rank
    assert found["sequence parallel"] == pytest.approx(
        8 * 8 * (start + 3.4e-6 + 0.5 * output / 1e11)
    )
    assert found["ring of keys"] == pytest.approx(8 * 2 * (start + output / 1e11))
    # gradients in fp32, of keys in bf16
    assert found["ring of gradients"] == pytest.approx(8 * 2 * (start + 2 * output / 1e11))
    # 1e11 of its operations are scores, and as many are masked: the last rank sees both chunks
    flops = BLOCK.flops + 2 * 10**11
    scores = replace(BLOCK, flops=flops, score_flops=10**11, masked_flops=10**11)
    work = replace(WORK, parts=(scores, HEAD, LOSS))
    hidden = step_time(work, Parallelism(sequence=4, ring=2), MACHINE, IDEAL).seconds
    assert "ring of keys" not in hidden
    assert hidden["compute"] - found["compute"] == pytest.approx(8 * 3 * 1e11 / 4 * 4 / 3 / 1e14)


def test_an_offloaded_optimizer_runs_at_the_hosts_speed() -> None:
    found = seconds(data=8, zero_stage=1, is_offloaded=True)
    share = PARAMS / 8
    assert found["offload transfers"] == pytest.approx(2 * 2 * share / 2e10)
    # eight ranks share the host's memory
    assert found["optimizer"] == pytest.approx(share * 34 * 8 / 2e11)
    slow = seconds(data=8, zero_stage=1, is_offloaded=True, host_kernel=False)
    assert slow["optimizer"] == pytest.approx(6 * found["optimizer"])
    at_home = seconds(data=8, zero_stage=3)
    away = seconds(data=8, zero_stage=3, weights_offloaded=True)
    assert away["offload transfers"] == pytest.approx(2 * share / 2e10)
    assert away.keys() - at_home.keys() == {"offload transfers"}


def test_small_parts_take_as_long_as_they_take_to_start() -> None:
    rates = replace(IDEAL, launch_seconds=0.1)
    parts = [replace(part, num_operations=10) for part in (BLOCK, HEAD)]
    work = replace(WORK, parts=(*parts, LOSS))
    found = step_time(work, Parallelism(), MACHINE, rates)
    passes = sum(found.seconds[name] for name in ("compute", "memory-bound operations", "launch"))
    # eight blocks and a head of ten operations forward and twenty backward
    assert passes == pytest.approx(3 * 9, rel=1e-3)
    again = step_time(work, Parallelism(recomputed=1.0), MACHINE, rates).seconds["launch"]
    assert again - found.seconds["launch"] == pytest.approx(9, rel=1e-2)


def test_narrow_products_are_slower() -> None:
    rates = replace(IDEAL, width=10_000 * 10**0.5)
    assert seconds(rates=rates)["compute"] > 1.9 * seconds()["compute"]


def test_what_no_weight_takes_part_in_has_the_rate_of_attention() -> None:
    rates = replace(IDEAL, attention=0.5)
    scores = replace(BLOCK, flops=BLOCK.flops + 10**11, score_flops=10**11)
    found = step_time(replace(WORK, parts=(scores, HEAD, LOSS)), Parallelism(), MACHINE, rates)
    assert found.seconds["compute"] == pytest.approx(
        seconds(rates=rates)["compute"] + 3 * 8 * 2e11 / 1e14
    )
    half = replace(scores, score_flops=10**11 // 2, masked_flops=10**11 // 2)
    found = step_time(replace(WORK, parts=(half, HEAD, LOSS)), Parallelism(), MACHINE, rates)
    assert found.seconds["compute"] == pytest.approx(
        seconds(rates=rates)["compute"] + 3 * 8 * 1e11 / 1e14
    )
    assert found.model_flops == 3 * (8 * scores.flops + HEAD.flops), (
        "utilisation counts masked ones"
    )


@pytest.mark.parametrize(
    ("frozen", "frozen_scores", "backward"),
    [
        (0, 0, 2 * 2 + 2 * 1),  # all is trained
        (2 * 10**11, 0, 1 * 2 + 2 * 1),  # weights are frozen, and a gradient flows to inputs
        (2 * (2 + 1) * 10**11, 2 * 10**11, 0),  # nothing is trained up to here
    ],
)
def test_products_have_their_own_gradients_each(
    frozen: int, frozen_scores: int, backward: float
) -> None:
    """Two products for one with a trained weight, one for a frozen one, two for scores."""
    rates = replace(IDEAL, attention=0.5)
    block = replace(
        BLOCK,
        flops=BLOCK.flops + 10**11,
        score_flops=10**11,
        frozen_flops=frozen,
        frozen_score_flops=frozen_scores,
        count=1,
    )
    found = step_time(replace(WORK, parts=(block, LOSS)), Parallelism(), MACHINE, rates)
    weights, scores = 2e11 / 1e14, 1e11 / 1e14 / 0.5
    expected = weights + scores
    if backward:
        expected += 2 * scores + (2 - frozen / 2e11) * weights
    assert found.seconds["compute"] == pytest.approx(expected)
    assert block.backward_weight_flops + block.backward_score_flops == backward * 10**11


@pytest.mark.parametrize(
    ("change", "by", "lacks"),
    [
        ({"flops_per_second": {}}, {}, "peak in bf16"),
        ({"memory_bytes_per_second": None}, {}, "memory bandwidth"),
        ({"collective_bytes_per_second": None}, {"data": 8}, "bandwidth between devices"),
        (
            {"host_bytes_per_second": None},
            {"zero_stage": 1, "is_offloaded": True},
            "bandwidth to host memory",
        ),
        (
            {"host_memory_bytes_per_second": None},
            {"zero_stage": 1, "is_offloaded": True},
            "memory bandwidth of the h",
        ),
    ],
)
def test_what_is_not_known_is_not_guessed(
    change: dict[str, Any], by: dict[str, Any], lacks: str
) -> None:
    machine = replace(MACHINE, device=replace(DEVICE, **change))
    with pytest.raises(NotEstimatedError, match=f"the {lacks}.* is not known"):
        step_time(WORK, Parallelism(**by), machine)


def test_an_unknown_network_matters_between_hosts_only() -> None:
    machine = replace(MACHINE, network=None)
    assert step_time(WORK, Parallelism(data=8), machine).total > 0
    with pytest.raises(NotEstimatedError, match="network between hosts"):
        step_time(WORK, Parallelism(data=16), machine)


def test_measured_overheads_count() -> None:
    machine = replace(MACHINE, step_overhead_seconds=0.5, all_reduce_latency_seconds=0.1)
    found = step_time(WORK, Parallelism(data=8, bucket=10**9), machine, IDEAL).seconds
    assert found["step overhead"] == 0.5
    # nine weights of which each is a bucket of its own
    assert found["gradient sums"] == pytest.approx(9 * 0.1 + 2 * 7 / 8 * 2 * PARAMS / 1e11)


LAYOUTS = st.builds(
    Parallelism,
    data=st.sampled_from([1, 2, 8, 16, 48]),
    pipe=st.sampled_from([1, 2, 3, 8]),
    tensor=st.sampled_from([1, 2, 8]),
    sequence=st.sampled_from([1, 2]),
    zero_stage=st.integers(0, 3),
    accumulation=st.integers(1, 9),
    micro_size=st.sampled_from([1, 3, 64]),
    recomputed=st.sampled_from([0.0, 0.5, 1.0]),
    overlaps=st.booleans(),
    scatters=st.booleans(),
    prefetch=st.sampled_from([0, 5 * 10**7]),
    bucket=st.sampled_from([10**6, 5 * 10**7, 10**10]),
    is_offloaded=st.booleans(),
)
FIGURES = [
    *("memory_bytes_per_second", "collective_bytes_per_second", "host_bytes_per_second"),
    *("host_memory_bytes_per_second", "flops_per_second", "network"),
]


def faster(machine: Machine, figure: str, factor: float) -> Machine:
    if figure == "network":
        assert machine.network is not None
        bandwidth = factor * machine.network.bytes_per_second
        return replace(machine, network=replace(machine.network, bytes_per_second=bandwidth))
    value = getattr(machine.device, figure)
    scaled = (
        {name: factor * each for name, each in value.items()}
        if isinstance(value, dict)
        else factor * value
    )
    return replace(machine, device=replace(machine.device, **{figure: scaled}))


@settings(max_examples=60)
@given(LAYOUTS, st.sampled_from(FIGURES), st.floats(1.0, 100.0))
def test_a_faster_part_never_makes_a_step_slower(
    by: Parallelism, figure: str, factor: float
) -> None:
    before = step_time(WORK, by, MACHINE).total
    assert 0 < step_time(WORK, by, faster(MACHINE, figure, factor)).total <= before * (1 + 1e-9)


@settings(max_examples=60)
@given(LAYOUTS)
def test_less_to_do_never_takes_longer(by: Parallelism) -> None:
    total = step_time(WORK, by, MACHINE).total
    assert step_time(WORK, replace(by, overlaps=True), MACHINE).total <= total * (1 + 1e-9)
    assert step_time(WORK, replace(by, recomputed=0.0), MACHINE).total <= total * (1 + 1e-9)
    assert step_time(WORK, replace(by, accumulation=by.accumulation + 1), MACHINE).total > total
    assert step_time(WORK, replace(by, micro_size=by.micro_size + 1), MACHINE).total > total


def planned(
    ranks: int = 8, machine: Machine | None = None, **sections: Any
) -> tuple[StepTime, Parallelism]:
    values = {
        "model": {"kind": "gpt", "size": "gpt2", "dropout": 0.0},
        "data": {"kind": "text", "sequence_length": 1024},
        "task": {"kind": "causal_lm"},
        "batch": {"micro_size": 4, "accumulation_steps": 2},
        "precision": {"dtype": "bf16"},
        "training": {"max_steps": 10},
        **sections,
    }
    config = config_from_values(values)
    plan = make_plan(config, Cluster(devices_per_host=ranks))
    work = named_work(config, 1)
    assert work is not None
    return estimate_time(plan, work, machine or Machine.listed("a100-80gb")), Parallelism.from_plan(
        plan
    )


def test_a_plan_names_its_distribution() -> None:
    zero = {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 10**7,
        "offload_optimizer": {"device": "cpu"},
    }
    found, by = planned(
        zero=zero, training={"max_steps": 1, "recompute_every": 2}, optimizer={"kind": "lion"}
    )
    assert by == Parallelism(
        data=8,
        zero_stage=2,
        accumulation=2,
        micro_size=4,
        state_bytes=8,
        recomputed=1.0,
        bucket=10**7,
        joins_gradients=True,
        sends_parts=False,
        block_sums=(2, 2),
        is_offloaded=True,
    )
    assert found.num_tokens == 8 * 2 * 4 * 1024
    assert {"offload transfers", "gradient sums", "weight gathers"} <= found.seconds.keys()


@pytest.mark.parametrize(("size", "case"), [("gpt2", "ZeRO 1"), ("gpt2-xl", "1.6 billion, ZeRO 1")])
def test_the_step_of_stages_1_and_2_takes_less_than_deepspeeds_own(size: str, case: str) -> None:
    """It was measured with two sizes, one twelve times the other; stage 0 joins nothing."""
    step_ms, share = json.loads((ROOT / "benchmarks/results/one_gpu.json").read_text())[
        "optimizer_share"
    ][case]
    model, machine = {"kind": "gpt", "size": size}, Machine.listed("h200-141gb")
    found = planned(1, machine, model=model, zero={"stage": 1})[0].seconds["optimizer"]
    assert 0.3 < found / (share * step_ms / 1000) < 0.7
    assert (
        planned(1, machine, model=model, zero={"stage": 0}, precision={"dtype": "fp32"})[0].seconds[
            "optimizer"
        ]
        < found
    )


def test_precisions_of_a_plan() -> None:
    wide, tf32, cast = (
        planned(precision=precision)[1]
        for precision in (
            {"dtype": "fp32"},
            {"dtype": "fp32", "matmul": "high"},
            {"dtype": "autocast"},
        )
    )
    assert (wide.dtype, wide.weight_bytes, wide.gradient_bytes, wide.state_bytes) == (
        "fp32",
        4,
        4,
        8,
    )
    assert (tf32.dtype, cast.dtype, cast.weight_bytes) == ("tf32", "bf16", 4)
    assert planned(precision={"dtype": "autocast", "compute_dtype": "fp16"})[1].dtype == "fp16"
    assert not planned(zero={"stage": 1})[1].overlaps
    assert planned(zero={"stage": 0})[1].overlaps
    # sums over more than 8 ranks are in fp32
    assert planned(16, zero={"stage": 1})[1].gradient_bytes == 4


def test_a_plan_in_fp8() -> None:
    rounded = {"dtype": "bf16", "fp8": True}
    h100 = Machine.listed("h100-80gb")
    plain = planned(machine=h100)
    compiled = planned(machine=h100, precision=rounded)
    assert (compiled[1].dtype, compiled[1].rounding_bytes) == ("bf16", 5)
    assert plain[1].rounding_bytes == 0
    as_written = planned(
        machine=h100, precision=rounded, training={"max_steps": 10, "compile": False}
    )
    assert as_written[1].rounding_bytes == 33
    assert compiled[0].seconds["compute"] < plain[0].seconds["compute"]
    assert as_written[0].total > compiled[0].total
    emulated = planned(precision={"dtype": "bf16", "fp8": {"emulate": True}})
    assert emulated[1].rounding_bytes == 0


def test_a_plan_on_a_device_that_lacks_its_precision_is_not_estimated() -> None:
    with pytest.raises(NotEstimatedError, match="peak in bf16 of v100-32gb"):
        planned(machine=Machine.listed("v100-32gb"))
    assert planned(machine=Machine.listed("v100-32gb"), precision={"dtype": "fp16"})[0].total > 0


def plan_of(**sections: Any) -> Plan:
    values = {
        "zero": {"stage": 1},
        "data": {"kind": "text"},
        "model": {"kind": "gpt"},
        "task": {"kind": "causal_lm"},
    } | sections
    return make_plan(
        config_from_values(values | {"training": {"max_steps": 1} | sections.get("training", {})}),
        Cluster(1, 8),
    )


def test_operations_of_a_step_by_hand() -> None:
    """A micro-batch takes 8 x 2e11 + 1e11 = 1.7e12 operations forward; each of 4 replicas of 2
    stages has 4 of them.
    """
    layout = {
        "batch": {"global_size": 16, "micro_size": 1},
        "parallel": {"pipe": 2},
        "precision": {"dtype": "bf16"},
    }
    found = flops_per_step(plan_of(**layout), WORK, DEVICE.flops_per_second)
    # 3 x 1.7e12 x 4 micro-batches, on two devices each.
    assert found == pytest.approx({"throughput/tflops": 10.2, "throughput/mfu": 0.102})
    again = flops_per_step(
        plan_of(**layout, training={"recompute_every": 1}), WORK, DEVICE.flops_per_second
    )
    assert again == pytest.approx({**found, "throughput/hfu": 0.136})


@pytest.mark.parametrize(("dtype", "peak"), [("fp32", 1e13), ("autocast", 1e14), ("fp16", None)])
def test_utilisation_is_of_the_peak_of_the_type(dtype: str, peak: float | None) -> None:
    plan = plan_of(batch={"global_size": 8}, precision={"dtype": dtype})
    found = flops_per_step(plan, WORK, DEVICE.flops_per_second)
    assert found["throughput/tflops"] == pytest.approx(5.1)
    assert found.get("throughput/mfu") == (pytest.approx(5.1e12 / peak) if peak else None)


def test_neither_operations_nor_peaks_are_guessed() -> None:
    plan = plan_of(batch={"global_size": 8})
    assert flops_per_step(plan, None, DEVICE.flops_per_second) == {}
    assert set(flops_per_step(plan, WORK, {})) == {"throughput/tflops"}


def test_a_step_of_adapters_takes_less_than_one_of_all_weights() -> None:
    """Products with frozen weights have the rate of their size, and one product backward, not two."""
    model = {"model": {"kind": "gpt", "size": "gpt2-xl"}}
    lora = {"max_steps": 1, "lora": {"target_modules": ["query", "value"]}}
    whole, _ = planned(1, **model)
    adapted, _ = planned(1, training=lora, **model)
    share = adapted.seconds["compute"] / whole.seconds["compute"]
    assert 0.6 < share < 0.75
    assert adapted.model_flops / whole.model_flops == pytest.approx(share, rel=0.05)
    assert adapted.total < whole.total
