"""Messages of memory that was not there: what lacked it, when, for what, and what an estimate
adds.
"""

from __future__ import annotations

import pytest

from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.out_of_memory import advice, explain, in_one_sentence
from framework.plan.plan import Plan, make_plan
from framework.plan.shortage import Shortage, read_shortage, shortage_of
from framework.plan.work import work_of
from tests.plan.out_of_memory_texts import TEXTS

GIB = 2**30
MIB = 2**20


@pytest.mark.parametrize(
    ("name", "kind", "moment", "component"),
    [
        ("step-zero3", "device", "step", ""),
        ("step-adamw", "device", "step", "optimizer copies"),
        ("backward-zero3", "device", "backward", ""),
        ("loss", "device", "forward", "logits and loss"),
        ("initialize", "device", "start", ""),
        ("initialize-state", "device", "start", "optimizer state"),
        ("nccl", "device", "start", "buffers of NCCL"),
        ("nccl-log", "device", "", "buffers of NCCL"),
        ("shared", "shared", "", ""),
        ("host", "host", "", ""),
        ("killed-deepspeed", "killed", "", ""),
        ("killed-torchrun", "killed", "", ""),
        ("fragmented", "device", "", ""),
        ("others", "device", "", ""),
        ("hip", "device", "", ""),
        ("pinned", "pinned", "start", ""),
        ("rich", "device", "step", "optimizer copies"),
        ("step-quoted", "device", "step", "optimizer copies"),
        ("own-unknown", "device", "", ""),
    ],
)
def test_a_text_shows_what_lacked_memory_when_and_for_what(
    name: str, kind: str, moment: str, component: str
) -> None:
    found = read_shortage(TEXTS[name])
    assert found is not None
    assert (found.kind, found.moment, found.component) == (kind, moment, component)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (
            "step-zero3",
            {"asked": 3.39, "capacity": 79.32, "free": 2.40, "allocated": 73.28, "unused": 1.59},
        ),
        (
            "loss",
            {"asked": 9.14, "capacity": 39.41, "free": 5.86, "allocated": 26.21, "unused": 5.78},
        ),
        ("initialize-state", {"asked": 8.52, "capacity": 31.72, "free": 5.39, "allocated": 25.59}),
        (
            "fragmented",
            {"asked": 35.6, "capacity": 79.33, "free": 26.16, "allocated": 11.97, "unused": 40.69},
        ),
        (
            "rich",
            {"asked": 20 / 1024, "capacity": 23.99, "free": 0, "allocated": 22.83, "unused": 0.32},
        ),
        ("step-adamw", {"asked": 130 / 1024, "capacity": 94.99, "free": 87.19 / 1024}),
        (
            "others",
            {
                "asked": 136 / 1024,
                "capacity": 23.65,
                "free": 93.81 / 1024,
                "allocated": 21.51,
                "unused": 0.002,
                "others": 1.55,
            },
        ),
        (
            "own-unknown",
            {"asked": 8, "capacity": 79.15, "free": 2.65, "allocated": 48.16, "unused": 3.21},
        ),
        ("host", {"asked": 4009910272 / GIB}),
        ("nccl-log", {"asked": 6291456 / GIB}),
    ],
)
def test_the_sizes_are_the_messages(name: str, sizes: dict[str, float]) -> None:
    found = read_shortage(TEXTS[name])
    assert found is not None
    assert found.sizes is not None
    assert {key: size / GIB for key, size in found.sizes.items()} == pytest.approx(sizes, abs=0.011)


_OF_TORCH = (
    ("exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)", "step", "optimizer copies"),
    ("state['exp_avg'] = torch.zeros_like(p)", "step", "optimizer state"),
    ("return Variable._execution_engine.run_backward(", "backward", ""),
    ("loss.backward()", "backward", ""),
    ("logits = logits.float()", "forward", "logits and loss"),
    ("return F.linear(input, self.weight, self.bias)", "forward", "activations"),
    ("raise error", "", ""),
)


@pytest.mark.parametrize(("line", "moment", "component"), _OF_TORCH)
def test_without_frames_the_line_that_python_quotes_shows_the_moment(
    line: str, moment: str, component: str
) -> None:
    found = read_shortage(f"    {line}\n{TEXTS['own-unknown']}")
    assert found is not None
    assert (found.moment, found.component) == (moment, component)
    assert found.place == (f"`{line}`" if moment else "")
    # frames say more than a line
    with_frames = read_shortage(f"    {line}\n{TEXTS['backward-zero3']}")
    assert with_frames is not None
    assert with_frames.moment == "backward"


def test_pieces_and_other_processes_are_reported() -> None:
    (pieces,) = advice(of("fragmented"))
    assert pieces.startswith(
        "torch holds 40.69 GiB in unused pieces, more than was asked for: set PYTORCH_CUDA_ALLOC"
    )
    assert not of("step-zero3").is_fragmented  # 1.59 GiB of 79, less than was asked for
    (others,) = advice(of("others"))
    assert others.startswith("other processes hold 1.55 GiB of this device")
    assert list(advice(of("step-adamw"))) == []
    assert "dmesg" in next(iter(advice(of("killed-torchrun"))))
    assert "ulimit -l" in next(iter(advice(of("pinned"))))


def test_the_first_rank_that_fails_is_read_and_not_what_its_end_makes_of_others() -> None:
    text = f"{TEXTS['step-adamw']}{TEXTS['killed-torchrun']}{TEXTS['killed-deepspeed']}"
    found = read_shortage(text)
    assert found is not None
    assert (found.kind, found.moment) == ("device", "step")


def test_frames_of_other_ranks_do_not_count() -> None:
    other = TEXTS["backward-zero3"].partition("[rank1]: torch.cuda")[0]
    own = TEXTS["step-adamw"].splitlines()
    mixed = "\n".join([*own[:3], *other.splitlines(), *own[3:]])
    found = read_shortage(mixed)
    assert found is not None
    assert (found.moment, found.component) == ("step", "optimizer copies")


@pytest.mark.parametrize(
    "text", ["", "RuntimeError: shapes", "loss 0.1\nserver: out of memory", "exit code 1"]
)
def test_other_texts_are_none(text: str) -> None:
    assert read_shortage(text) is None


def test_fixes_take_less_at_that_moment_and_the_largest_gain_comes_first() -> None:
    found = explain(of("step-adamw"), plan(zero={"stage": 1}))
    assert found.memory is not None
    assert found.at == "step"
    gains = [found.gain(each) for each in found.fixes]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 0
    named = {str(each): each for each in found.fixes}
    assert "zero.stage: 3" in named
    assert found.gain(named["zero.stage: 3"]) == found.memory.total("step") - named[
        "zero.stage: 3"
    ].memory.total("step")


def test_where_the_host_lacks_memory_its_own_components_count() -> None:
    found = explain(of("host"), plan(zero={"stage": 2, "offload_optimizer": {"device": "cpu"}}))
    assert found.memory is not None
    assert dict(found.components) == dict(found.memory.host)
    assert "zero.offload_optimizer.device: none" in map(str, found.fixes)


def test_on_processors_the_host_is_the_device() -> None:
    found = explain(of("host"), make_plan(plan().config, Cluster(devices_per_host=8, device="cpu")))
    assert found.memory is not None
    assert found.total == found.memory.total(found.memory.peak)
    assert "zero.stage: 3" in map(str, found.fixes)


def test_nothing_is_a_fix_that_takes_no_less() -> None:
    found = explain(of("host"), plan())  # nothing is offloaded
    assert (found.total, found.fixes) == (0, ())


def test_a_fix_is_enough_where_what_was_asked_for_would_have_been_there() -> None:
    found = explain(of("step-adamw"), plan(zero={"stage": 1}))
    needed = (found.shortage.sizes or {})["asked"] - (found.shortage.sizes or {})["free"]
    assert all(found.is_enough(each) == (found.gain(each) >= needed) for each in found.fixes)
    assert any(map(found.is_enough, found.fixes))
    assert not any(map(explain(of("killed-torchrun"), plan()).is_enough, found.fixes))


def test_a_smaller_micro_batch_keeps_the_global_size() -> None:
    long = {"kind": "text", "sequence_length": 1024}
    alone = explain(of("backward-zero3"), plan(data=long))
    assert "batch.micro_size: 2, batch.accumulation_steps: 2" in map(str, alone.fixes)
    fixed = explain(
        of("backward-zero3"), plan(data=long, batch={"global_size": 64, "micro_size": 4})
    )
    assert "batch.micro_size: 2" in map(str, fixed.fixes)


def test_an_own_model_is_not_guessed() -> None:
    own = plan(model={"target": "framework.recipes.image_models.small_nets:LeNet"})
    found = explain(of("step-adamw"), own)
    assert (found.memory, found.fixes) == (None, ())
    assert found.unknown


def test_one_sentence_has_moment_components_and_fixes() -> None:
    text = in_one_sentence(of("step-adamw"), plan(zero={"stage": 1}))
    assert text.startswith(
        " (130.0 MiB were asked for, 87.2 MiB of 94.99 GiB are free) in the optimizer's step; "
    )
    assert "; by estimate " in text
    assert "; set zero.stage: 3" in text
    assert "\n" not in text


def of(name: str) -> Shortage:
    found = read_shortage(TEXTS[name])
    assert found is not None
    return found


def plan(**sections: object) -> Plan:
    values = {
        "model": {"kind": "gpt", "size": "gpt2-xl"},
        "data": {"kind": "text"},
        "task": {"kind": "causal_lm"},
    }
    config = config_from_values(
        {**values, "batch": {"micro_size": 4}, "training": {"max_steps": 10}, **sections}
    )
    return make_plan(config, Cluster(devices_per_host=8))


def test_a_model_of_ones_own_is_explained_by_its_traced_work() -> None:
    sections = {"zero": {"stage": 1}, "data": {"kind": "text", "sequence_length": 1024}}
    named, own = plan(**sections), plan(**sections, model={"target": "own:Net"})
    assert explain(of("backward-zero3"), own).memory is None
    found = explain(of("backward-zero3"), own, work=work_of(named))
    assert found.total == explain(of("backward-zero3"), named, work=work_of(named)).total > 0
    fixes = list(map(str, found.fixes))
    assert "batch.micro_size: 2, batch.accumulation_steps: 2" in fixes
    assert "precision.dtype: bf16" not in fixes, "in another type it would be other work"


def test_the_place_is_the_models_own_code() -> None:
    packages = "/opt/lib/python3.11/site-packages"
    frames = [
        ("/home/me/train.py", "main"),
        (f"{packages}/deepspeed/runtime/engine.py", "forward"),
        (f"{packages}/torch/nn/modules/module.py", "_wrapped_call_impl"),
        ("/home/me/project/nets.py", "forward"),
        (f"{packages}/torch/nn/modules/linear.py", "forward"),
        (f"{packages}/torch/nn/functional.py", "linear"),
    ]
    found = shortage_of("device", "CUDA out of memory", frames)
    assert (found.moment, found.place) == ("forward", "me/project/nets.py: forward")
    alone = shortage_of("device", "CUDA out of memory", frames[:3])
    assert alone.place == "deepspeed/runtime/engine.py: forward"


@pytest.mark.parametrize(
    ("frames", "moment"),
    [
        (
            [("framework/engine/base_engine.py", "__init__"), ("torch/functional.py", "norm")],
            "start",
        ),
        (
            [
                ("framework/engine/base_engine.py", "save"),
                ("framework/engine/checkpoint_bytes.py", "save_bytes"),
            ],
            "save",
        ),
        (
            [
                ("framework/engine/base_engine.py", "load"),
                ("deepspeed/runtime/engine.py", "load_checkpoint"),
            ],
            "load",
        ),
    ],
)
def test_a_save_or_a_load_of_the_engine_is_not_its_start(
    frames: list[tuple[str, str]], moment: str
) -> None:
    assert shortage_of("device", "CUDA out of memory", frames).moment == moment
