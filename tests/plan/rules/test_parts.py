"""What the lines say, and parts of the user's own, which no rule between known kinds may judge."""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.rules import apply_rules

TARGET = {"target": "a:b"}
GPT = {"model": {"kind": "gpt"}, "data": {"kind": "text"}, "task": {"kind": "causal_lm"}}
BERT = {"model": {"kind": "bert"}, "data": {"kind": "text_pairs"}, "task": {"kind": "masked_lm"}}


def lines(values: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in apply_rules(config_from_values(values), Cluster())]


@pytest.mark.parametrize("values", [{}, GPT, BERT], ids=["images", "gpt", "bert"])
def test_parts_of_one_kind_go_together(values: dict[str, Any]) -> None:
    assert lines(values) == []


def test_text_with_an_image_model_and_its_loss() -> None:
    assert lines({"data": {"kind": "text"}}) == [
        "model.kind = lenet: it reads images, and text, the data, has windows of text; "
        "set model.kind: gpt or data.kind: digits [model-data-mismatch]",
        "task.kind = classification: it reads images, and text, the data, has windows of text; "
        "set task.kind: causal_lm or data.kind: digits [task-data-mismatch]",
    ]


def test_the_two_kinds_of_text_are_distinguished() -> None:
    assert [line.rpartition(" ")[2] for line in lines(GPT | {"data": {"kind": "text_pairs"}})] == [
        "[model-data-mismatch]",
        "[task-data-mismatch]",
    ]


def test_own_data_leave_model_and_task_to_agree() -> None:
    assert lines(GPT | {"data": TARGET}) == []
    (line,) = lines({"model": {"kind": "gpt"}, "data": TARGET})
    assert line.startswith(
        "task.kind = classification: it reads images, and gpt, the model, reads windows of text; set task.kind: "
    )


@pytest.mark.parametrize("part", ["model", "task"])
def test_own_parts_are_not_judged(part: str) -> None:
    assert lines(GPT | {part: TARGET}) == []


def test_a_sequence_of_exactly_the_models_length_fits() -> None:
    model = {"kind": "gpt", "max_positions": 100}
    assert lines(GPT | {"model": model, "data": {"kind": "text", "sequence_length": 100}}) == []
    assert lines(GPT | {"model": model, "data": {"kind": "text", "sequence_length": 101}}) == [
        "data.sequence_length = 101: the model has 100 positions; "
        "set data.sequence_length: 100 or model.max_positions: 101 [sequence-too-long]"
    ]


def test_the_vocabulary_of_bytes_is_known_and_that_of_a_file_is_not() -> None:
    small = GPT | {"model": {"kind": "gpt", "vocab_size": 260}}
    assert lines(small) == [
        "model.vocab_size = 260: the data has 261 different tokens; set model.vocab_size: 261 or more "
        "[model-data-vocab-size]"
    ]
    assert lines(small | {"data": {"kind": "text", "path": "tokens"}}) == []


@pytest.mark.parametrize(
    ("num_experts", "size", "line"),
    [
        (6, 4, "4: 6 experts cannot be split evenly over 4 ranks; set parallel.expert: 2"),
        (
            6,
            3,
            "3: 8 data-parallel ranks cannot be split evenly into groups of 3; "
            "set parallel.expert: 2",
        ),
        (6, 2, ""),
    ],
)
def test_the_size_that_is_offered_divides_experts_and_ranks(
    num_experts: int, size: int, line: str
) -> None:
    model = {"kind": "gpt", "moe": {"num_experts": num_experts}}
    values = GPT | {"model": model, "parallel": {"expert": size}, "zero": {"stage": 1}}
    found = apply_rules(config_from_values(values), Cluster(devices_per_host=8))
    written = f"parallel.expert = {line} [experts-not-divisible]"
    assert [str(problem) for problem in found] == [written] * bool(line)
