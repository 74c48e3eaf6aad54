"""What goes with what: read off the runs that tests hold against plain PyTorch, and off what
`check` refuses.

python -m tests.engine.combinations      # writes the tables into docs/parallelism.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Final, NamedTuple

from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from tests.engine import (
    test_against_pytorch,
    test_ema,
    test_experts,
    test_lora,
    test_nvme,
    test_own_optimizers,
    test_packed_experts,
    test_pipeline,
    test_sequence,
    test_step_loss,
    test_tensor,
    test_tensor_adapters,
    test_tensor_pipe,
    test_twin_flow,
    test_zenflow,
)
from tests.places import ROOT

PAGE: Final = ROOT / "docs/parallelism.md"
BEGIN, END = (
    "<!-- combinations: python -m tests.engine.combinations -->\n",
    "<!-- end of combinations -->\n",
)
STAGES: Final = (0, 1, 2, 3)
Values = Mapping[str, Any]

_GPT: Final = {
    "model": {"kind": "gpt", "num_heads": 8},
    "data": {"kind": "text"},
    "task": {"kind": "causal_lm"},
}
_MIXED: Final = {**_GPT, "model": {**_GPT["model"], "moe": {"num_experts": 8}}}
# Ways to train a model, as its rows of the tables -> a config of each.
WAYS: Final[Mapping[str, Values]] = {
    "data alone": _GPT,
    "`parallel.pipe`": {
        **_GPT,
        "parallel": {"pipe": 2},
        "batch": {"micro_size": 1, "accumulation_steps": 16},
    },
    "`parallel.tensor`": {**_GPT, "parallel": {"tensor": 2}},
    "`parallel.sequence`": {**_GPT, "parallel": {"sequence": 2}},
    "`model.moe`": _MIXED,
    "`parallel.expert`": {**_MIXED, "parallel": {"expert": 2}},
    "`training.lora`": {**_GPT, "training": {"lora": {"target_modules": ["query", "value"]}}},
}
_ADAM_ON_HOST: Final = {"optimizer": {"kind": "adamw", "implementation": "deepspeed"}}
# What else a run may have -> a config of it, and how it is known in one.
FEATURES: Final[Mapping[str, Values]] = {
    "SGD": {"optimizer": {"kind": "sgd", "momentum": 0.9}},
    "AdamW": {"optimizer": {"kind": "adamw"}},
    "Muon": {"optimizer": {"kind": "muon"}},
    "Adafactor": {"optimizer": {"kind": "adafactor"}},
    "Lamb": {"optimizer": {"kind": "lamb"}},
    "accumulation": {"batch": {"micro_size": 1, "accumulation_steps": 16}},
    "clipping": {"training": {"clip_grad_norm": 1.0}},
    "EMA": {"training": {"ema": {"decay": 0.9}}},
    "recomputation": {"training": {"recompute_every": 1}},
    "offload": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "NVMe": {"zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "drive"}}},
    "Twin-Flow": {**_ADAM_ON_HOST, "zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    "ZenFlow": {
        **_ADAM_ON_HOST,
        "zero": {"offload_optimizer": {"device": "cpu", "zenflow": {"topk_ratio": 0.2}}},
        "precision": {"dtype": "bf16"},
    },
    "offloaded weights": {"zero": {"offload_param": {"device": "cpu"}}},
    "autocast": {"precision": {"dtype": "autocast"}},
    "bf16": {"precision": {"dtype": "bf16"}},
    "fp16": {"precision": {"dtype": "fp16"}},
}
_CLUSTER: Final = Cluster(devices_per_host=8, device="cuda")


class Run(NamedTuple):
    """A run that a test holds against plain PyTorch in one process, some with `--exhaustive`
    alone.
    """

    ranks: int
    values: Values


def proven() -> Iterator[Run]:
    """All of them."""
    nowhere = Path()
    for ranks in (1, 2):
        yield from (Run(ranks, one) for one in test_against_pytorch.zero_cases(nowhere, ranks))
    for name, (section, _) in test_against_pytorch.OPTIMIZERS.items():
        for stage in (0, 2):
            yield Run(
                2,
                test_against_pytorch.config(
                    name, nowhere, optimizer=section, zero={"stage": stage}
                ),
            )
    for name, (section, *_) in test_against_pytorch.WHOLE.items():
        yield Run(2, test_against_pytorch.config(name, nowhere, optimizer=section))
    yield from (Run(2, one) for one in test_against_pytorch.divided_muon_cases(nowhere))
    yield from (
        Run(2, one)
        for one in (*test_step_loss.plain_cases(nowhere), *test_step_loss.pipe_cases(nowhere))
    )
    yield from (
        Run(2, test_ema.config(name, nowhere, **case)) for name, case in test_ema.CASES.items()
    )
    for ranks, pipes in ((2, test_pipeline.TWO_RANKS), (4, test_pipeline.FOUR_RANKS)):
        yield from (
            Run(ranks, test_pipeline.values(one, nowhere, nowhere, global_size=16)) for one in pipes
        )
    for ranks, groups in (
        (2, [*test_tensor.TWO_RANKS, *test_tensor.RARE_TWO]),
        (4, [*test_tensor.FOUR_RANKS, *test_tensor.RARE_FOUR]),
    ):
        yield from (
            Run(ranks, test_tensor.values(one, nowhere, nowhere, micro_size=16 // ranks))
            for one in groups
        )
    for stage, sections in test_tensor.PAIRS.values():
        case = test_tensor.Case("gpt", stage)
        yield Run(2, test_tensor.values(case, nowhere, nowhere, micro_size=8, **sections))
    for ranks, groups in (
        (4, [*test_tensor_pipe.FOUR_RANKS, *test_tensor_pipe.RARE_FOUR]),
        (8, [*test_tensor_pipe.EIGHT_RANKS, *test_tensor_pipe.RARE_EIGHT]),
    ):
        yield from (Run(ranks, test_tensor_pipe.values(one, nowhere, nowhere)) for one in groups)
    of_four = (
        test_sequence.FOUR_RANKS
        | test_sequence.RARE_FOUR
        | test_sequence.DIVIDED
        | test_sequence.RARE_DIVIDED
        | test_sequence.PIPED
        | test_sequence.RING
        | test_sequence.RARE_RING
    )
    for ranks, cases in ((2, test_sequence.TWO_RANKS | test_sequence.RARE), (4, of_four)):
        yield from (
            Run(ranks, test_sequence.values(name, one, nowhere, nowhere))
            for name, one in cases.items()
        )
    for name, (case_name, sections, _) in (
        test_sequence.VARIANTS | test_sequence.RARE_VARIANTS
    ).items():
        yield Run(
            2,
            test_sequence.values(
                name, test_sequence.TWO_RANKS[case_name], nowhere, nowhere, **sections
            ),
        )
    mixtures = test_experts
    for mixed in (*mixtures.TWO, *mixtures.RARE, *mixtures.FOUR, *mixtures.RARE_FOUR):
        yield Run(mixed.ranks, mixed.config(nowhere))
    packed = test_packed_experts
    for one in (*packed.TWO, *packed.RARE, *packed.FOUR, *packed.RARE_FOUR, *packed.RARE_EIGHT):
        yield Run(one.ranks, one.config(nowhere))
    yield from (Run(2, test_experts.varied(name, nowhere)) for name in test_experts.VARIANTS)
    yield from (Run(one.ranks, one.config(nowhere)) for one in (*test_nvme.TWO, *test_nvme.FOUR))
    for name, sections in test_own_optimizers.RUNS.items():
        yield Run(2, test_own_optimizers.config(name, nowhere, nowhere, **sections))
    yield from (Run(2, one) for one in test_twin_flow.held_cases(nowhere, nowhere))
    yield from (Run(test_zenflow.RANKS, one.config(nowhere)) for one in test_zenflow.HELD)
    yield from (Run(2, one) for one in test_lora.held_cases(nowhere))
    yield from (Run(ranks, one) for ranks, one in test_tensor_adapters.held_cases(nowhere))


def ways_of(values: Values) -> frozenset[str]:
    """The ways that a run goes."""
    parallel, is_mixed = values.get("parallel", {}), "moe" in values.get("model", {})
    found = [
        f"`parallel.{name}`"
        for name in ("pipe", "tensor", "sequence", "expert")
        if parallel.get(name, 1) > 1
    ]
    found += ["`model.moe`"] if is_mixed and parallel.get("expert", 1) == 1 else []
    found += ["`training.lora`"] if values.get("training", {}).get("lora") else []
    return frozenset(found or ["data alone"])


def features_of(run: Run) -> set[str]:
    """The columns of a run."""
    config = config_from_values(run.values)
    kind, dtype = getattr(config.optimizer, "kind", ""), config.precision.dtype
    layout = make_plan(config, Cluster(devices_per_host=run.ranks)).layout
    return {
        *(name for name in ("SGD", "AdamW", "Muon", "Adafactor", "Lamb") if name.lower() == kind),
        *(name for name in ("autocast", "bf16", "fp16") if name == dtype),
        *(["accumulation"] if layout.accumulation_steps > 1 else []),
        *(["clipping"] if config.training.clip_grad_norm else []),
        *(["EMA"] if config.training.ema else []),
        *(["recomputation"] if config.training.recompute_every else []),
        *_optimizer_on_host(config),
        *(["NVMe"] if config.zero.offload_optimizer.device == "nvme" else []),
        *(["offloaded weights"] if config.zero.offload_param.device != "none" else []),
    }


def _optimizer_on_host(config: RunConfig) -> list[str]:
    """The way in which the optimizer's state is on the host, if it is."""
    offload = config.zero.offload_optimizer
    if offload.device != "cpu":
        return []
    if config.zero.zenflow is not None:
        return ["ZenFlow"]
    return ["Twin-Flow"] if offload.ratio < 1 else ["offload"]


def refused(*sections: Values, stage: int) -> str:
    """Kind of the problem that `check` has with these sections together; empty where it has
    none.
    """
    values: dict[str, Any] = {
        "batch": {"micro_size": 1, "accumulation_steps": 16},
        "zero": {"stage": stage},
    }
    for each in sections:
        for name, section in each.items():
            values[name] = {**values.get(name, {}), **section}
    try:
        make_plan(config_from_values(values), _CLUSTER)
    except ConfigError as error:
        return error.problems[0].kind
    return ""


class Cell(NamedTuple):
    """What is known of two things together."""

    stages: tuple[int, ...]
    refused: Mapping[int, str]

    @property
    def unknown(self) -> list[int]:
        """ZeRO stages that are neither proven nor refused."""
        return [stage for stage in STAGES if stage not in self.stages and stage not in self.refused]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.stages))
        return shown or " ".join(sorted({f"`{kind}`" for kind in self.refused.values()}))


class Table(NamedTuple):
    """Everything, by way and stage, by way and feature, and by two ways."""

    by_stage: Mapping[tuple[str, int], tuple[set[int], str]]
    by_feature: Mapping[tuple[str, str], Cell]
    by_ways: Mapping[tuple[str, str], Cell]


@cache
def table() -> Table:
    """Read all of it off."""
    runs = [(ways_of(run.values), run, features_of(run)) for run in proven()]
    stage_of = lambda run: run.values.get("zero", {}).get("stage", 0)  # noqa: E731
    by_stage, by_feature, by_ways = {}, {}, {}
    for way, config in WAYS.items():
        for stage in STAGES:
            exact = {
                run.ranks
                for own, run, names in runs
                if own == {way} and stage_of(run) == stage and not _HALF & names
            }
            by_stage[way, stage] = exact, refused(config, stage=stage)
        for name, section in FEATURES.items():
            stages = sorted(
                {stage_of(run) for own, run, names in runs if own == {way} and name in names}
            )
            kinds = {
                stage: kind for stage in STAGES if (kind := refused(config, section, stage=stage))
            }
            by_feature[way, name] = Cell(tuple(stages), kinds)
    for pair in combinations([way for way in WAYS if way != "data alone"], 2):
        if pair != ("`model.moe`", "`parallel.expert`"):  # which is one way
            stages = sorted({stage_of(run) for own, run, _ in runs if own == {*pair}})
            kinds = {
                stage: kind
                for stage in STAGES
                if (kind := refused(*map(WAYS.get, pair), stage=stage))
            }  # type: ignore[arg-type]
            by_ways[pair] = Cell(tuple(stages), kinds)
    return Table(by_stage, by_feature, by_ways)


_HALF: Final = {"autocast", "bf16", "fp16"}


def _rows(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown() -> str:
    """The tables as Markdown."""
    found = table()
    stages = [
        [way, *(" and ".join(map(str, sorted(ranks))) or f"`{kind}`" for ranks, kind in row)]
        for way in WAYS
        for row in [[found.by_stage[way, stage] for stage in STAGES]]
    ]
    features = [[name, *(str(found.by_feature[way, name]) for way in WAYS)] for name in FEATURES]
    names = [way for way in WAYS if way != "data alone"]
    ways = [
        [one, *(str(found.by_ways.get((one, two), "")) for two in names[1:])] for one in names[:-1]
    ]
    return (
        "Numbers of ranks on which fp32 steps are those of plain PyTorch, by ZeRO stage (3 to 20 steps, with\n"
        "`pytest --exhaustive`, which alone tries some of them, always 20); or the kind of the problem with which\n"
        "`check` refuses it:\n\n"
        + _rows(["", *(f"ZeRO {stage}" for stage in STAGES)], stages)
        + "\nZeRO stages at which each way was held against plain PyTorch together with something else (half\n"
        "precision within its rounding); or the kinds of the problems where it is refused at every stage:\n\n"
        + _rows(["", *WAYS], features)
        + "\nTwo ways at once: ZeRO stages that were held against plain PyTorch, or the kind of the problem:\n\n"
        + _rows(["", *names[1:]], ways)
    )


def main() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{shown()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
