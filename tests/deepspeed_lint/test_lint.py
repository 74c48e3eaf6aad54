"""`lint`: each key against the table of a release, and every problem at its place. The rules have
tests of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed_lint.errors import ConfigError, Problem, UsageError
from deepspeed_lint.keys import known_releases
from deepspeed_lint.lint import lint
from deepspeed_lint.text.document import Document
from deepspeed_lint.text.hjson import parse_hjson
from deepspeed_lint.topology import Topology
from tests.places import ROOT

# A whole config that nothing is wrong with, for a key to be added to.
FINE = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}

# What a key can be wrong in by itself.
BY_THEMSELVES = {
    "unknown-key",
    "wrong-value",
    "wrong-type",
    "loose-type",
    "removed-key",
    "inert-key",
    "deprecated-key",
    "both-names",
    "missing-key",
    "key-of-another-release",
    "auto-value",
    "dotted-key",
}


def found(text: str, release: str | None = None, topology: Topology | None = None) -> list[Problem]:
    return lint(parse_hjson(text, name="ds.json"), release=release, topology=topology)


def only(text: str, release: str | None = None) -> Problem:
    """Return the one problem of these keys by themselves, within a config that is fine; rules
    between keys may add problems.
    """
    problems = found(json.dumps(FINE)[:-1] + ", " + text.removeprefix("{"), release)
    (problem,) = [problem for problem in problems if problem.kind in BY_THEMSELVES]
    return problem


def test_a_fine_config_has_no_problem() -> None:
    assert found(json.dumps(FINE)) == []


# -------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        (
            '{"zero_optimization.stage": 3}',
            "zero_optimization.stage",
            'write it as sections: {"zero_optimization": {"stage": 3}}',
        ),
        (
            '{"fp16.enabled": true}',
            "fp16.enabled",
            'write it as sections: {"fp16": {"enabled": true}}',
        ),
        (
            '{"zero_optimization": {"stage": 2, "offload_optimizer.device": "cpu"}}',
            "zero_optimization.offload_optimizer.device",
            'write it as sections: {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}',
        ),
        (
            '{"optimizer.params[AdamW]": {"lr": 1}}',
            "optimizer.params[AdamW]",
            "write it as sections:",
        ),
        ('{"a.b": 1}', "a.b", "remove it"),
    ],
)
def test_a_name_with_a_dot_is_no_path(text: str, key: str, fix: str) -> None:
    problem = only(text)
    assert (problem.key, problem.kind, problem.severity) == (key, "dotted-key", "error")
    assert fix in problem.fix


@pytest.mark.parametrize(
    "name", ["_comment", "comment", "//", "# why", "_comment2", "$comment", "_note"]
)
def test_comments_made_of_keys_are_distinguished_from_slips(name: str) -> None:
    (outside,) = [
        p for p in found(json.dumps({**FINE, name: "words"})) if p.kind not in BY_THEMSELVES
    ]
    assert (outside.kind, outside.severity) == ("comment-key", "warning")
    (inside,) = [
        p
        for p in found(json.dumps({**FINE, "bf16": {"enabled": True, name: "words"}}))
        if p.kind == "comment-key"
    ]
    assert (inside.severity, inside.fix) == ("error", "write comments as // comments"), (
        "DeepSpeed's models refuse it"
    )


def test_the_release_of_a_new_key_is_named_as_far_as_it_is_known() -> None:
    assert "it came after 0.16.9, in 0.17.6 at the latest" in str(
        only('{"torch_autocast": {"enabled": false}}', "0.16.9")
    )
    assert "it came with 0.19.4;" in str(only('{"managed_gradient_accumulation": true}', "0.19.3"))


def test_choices_are_written_as_json_writes_them() -> None:
    assert (
        only('{"expert_parallel": {"enabled": true, "load_balance_coeff": 1}}').fix == "write null"
    )


# ------------------------------------------------------------------------------------------- places


def test_problems_stand_at_their_keys_in_the_order_of_the_file() -> None:
    text = (
        '{\n  "train_batch_size": 8, "gradient_clipping": 1.0,\n  "zero_optimization": {\n    // the stage\n    '
        '"stage": 9,\n'
        '    "stagee": 1},\n  "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},\n  "gradient_cliping": 1\n}\n'
    )
    assert [
        (problem.line, problem.column, problem.key, problem.kind) for problem in found(text)
    ] == [
        (5, 5, "zero_optimization.stage", "wrong-value"),
        (6, 5, "zero_optimization.stagee", "unknown-key"),
        (8, 3, "gradient_cliping", "unknown-key"),
    ]
    assert {problem.file for problem in found(text)} == {"ds.json"}


def test_a_missing_key_stands_at_its_section() -> None:
    problems = found(
        '{"train_batch_size": 8, "gradient_clipping": 1.0,\n "optimizer": {"params": {}}}'
    )
    (problem,) = [problem for problem in problems if problem.kind == "missing-key"]
    assert (problem.kind, problem.key, problem.line, problem.column) == (
        "missing-key",
        "optimizer.type",
        2,
        2,
    )


def test_elements_of_a_list_have_places() -> None:
    text = '{"expert_parallel": {\n"enabled": "no"},\n"compile": {"passes": [\n"z1",\n7]}}'
    places = {problem.key: problem.line for problem in found(text)}
    assert places["expert_parallel.enabled"] == 2
    assert places["compile.passes"] in (3, 4, 5)


def test_values_from_python_have_no_file() -> None:
    (problem,) = lint(Document("", {**FINE, "gradient_cliping": 1}))
    assert (problem.file, problem.line) == ("", 1)


# -------------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize(
    ("text", "kind", "severity", "stated"),
    [
        (
            '{"gradient_cliping": 1}',
            "unknown-key",
            "error",
            "drops it in silence; did you mean gradient_clipping?",
        ),
        (
            '{"bf16": {"enabld": true}}',
            "unknown-key",
            "error",
            "refuses it; did you mean bf16.enabled?",
        ),
        ('{"zero_optimization": {"stage": 4}}', "wrong-value", "error", "write 0, 1, 2, 3"),
        ('{"zero_optimization": {"stage": "two"}}', "wrong-type", "error", "write a whole number"),
        ('{"zero_optimization": {"stage": "2"}}', "loose-type", "warning", "write a whole number"),
        ('{"zero_optimization": {"stage": null}}', "wrong-type", "error", "leave the key out"),
        (
            '{"zero_optimization": {"offload_optimizer": {"ratio": 2}}}',
            "wrong-value",
            "error",
            "write at most 1",
        ),
        ('{"communication_data_type": "fp8"}', "wrong-value", "error", "write fp16, bf16"),
        ('{"memory_breakdown": 1}', "wrong-type", "error", "write true or false"),
        ('{"fp16": 3}', "wrong-type", "error", "write a section of keys"),
        (
            '{"amp": {"enabled": false}}',
            "removed-key",
            "error",
            "raises an error where it is present since 0.19.8",
        ),
        ('{"disable_allgather": true}', "inert-key", "warning", "does nothing with it"),
    ],
)
def test_one_key_is_one_problem_of_its_kind(
    text: str, kind: str, severity: str, stated: str
) -> None:
    problem = only(text)
    assert (problem.kind, problem.severity) == (kind, severity)
    assert stated in str(problem)


def test_both_names_of_a_key() -> None:
    problem = only(
        '{"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 9, "max_live_parameters": 9}}'
    )
    assert (problem.kind, problem.key) == ("both-names", "zero_optimization.max_live_parameters")


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ('{"train_micro_batch_size": 8}', "train_micro_batch_size_per_gpu"),
        ('{"zero_optimisation": {"stage": 2}}', "zero_optimization"),
        (
            '{"zero_optimization": {"stage": 2, "overlap_com": true}}',
            "zero_optimization.overlap_comm",
        ),
        ('{"stage3_prefetch_bucket_size": 5}', "zero_optimization.stage3_prefetch_bucket_size"),
        ('{"max_grad_norm": 1}', "gradient_clipping"),
        ('{"bf16": {"enabled": true, "loss_scale": 0}}', "fp16.loss_scale"),
        (
            '{"zero_optimization": {"offload_optimizer": {"devcie": "cpu"}}}',
            "zero_optimization.offload_optimizer.device",
        ),
    ],
)
def test_misspelt_and_misplaced_keys_are_guessed_with_their_section(text: str, guess: str) -> None:
    unknown = [problem for problem in found(text) if problem.kind == "unknown-key"]
    assert unknown[0].fix.startswith("did you mean ")
    assert guess in unknown[0].fix.removeprefix("did you mean ").rstrip("?").split(" or ")


def test_what_is_like_nothing_is_to_be_removed() -> None:
    assert only('{"qqqq": 1}').fix == "remove it"


def test_parameters_belong_to_the_type() -> None:
    lion = found(
        '{"train_batch_size": 8, "gradient_clipping": 1, "optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}'
    )
    assert [problem.key for problem in lion if problem.severity == "error"] == [
        "optimizer.params.eps"
    ]
    warmup = {**FINE, "scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}}
    assert "scheduler.params.total_num_steps" in [
        problem.key for problem in found(json.dumps(warmup))
    ]


# ---------------------------------------------------------------------------------- whole documents


def test_several_problems_come_at_once() -> None:
    text = '{"train_batch_size": "8", "zero_optimization": {"stag": 1, "stage": 7}, "fp16": {"enabled": 3}, "amp": 1, "zz": 0}'  # noqa: E501
    kinds = {(problem.key, problem.kind) for problem in found(text)}
    assert {
        ("train_batch_size", "wrong-type"),
        ("zero_optimization.stag", "unknown-key"),
        ("amp", "removed-key"),
        ("zero_optimization.stage", "wrong-value"),
        ("fp16.enabled", "wrong-type"),
        ("zz", "unknown-key"),
    } <= kinds


def test_nothing_is_reported_twice() -> None:
    text = '{"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": true, "stag": 1}, "amp": true}'  # noqa: E501
    stated = [str(problem) for problem in found(text)]
    assert len(stated) == len(set(stated))


def test_every_duplicate_key_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        found('{"fp16": {"enabled": true,\n"enabled": false},\n"bf16": {},\n"bf16": {}}')
    assert [(problem.kind, problem.key, problem.line) for problem in caught.value.problems] == [
        ("duplicate-key", "fp16.enabled", 2),
        ("duplicate-key", "bf16", 4),
    ]


@pytest.mark.parametrize("text", ["[1]", "7", '"text"'])
def test_what_is_no_object(text: str) -> None:
    (problem,) = found(text)
    assert (problem.kind, problem.line, problem.column) == ("config-syntax", 1, 1)


@pytest.mark.parametrize(
    ("text", "severity", "stated"),
    [
        ('{"gradient_accumulation_steps": "auto"}', "error", "breaks on it"),
        (
            '{"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}',
            "warning",
            "takes its default",
        ),
        ('{"prescale_gradients": "auto"}', "warning", "takes the text for true"),
    ],
)
def test_auto_is_reported_once_by_what_becomes_of_it(text: str, severity: str, stated: str) -> None:
    problem = only(text)
    assert (problem.kind, problem.severity) == ("auto-value", severity)
    assert stated in problem.reason


def test_auto_where_deepspeed_knows_the_value() -> None:
    assert found(json.dumps({**FINE, "data_types": {"keep_in_fp32_modules": "auto"}})) == []


def test_the_schema_key_of_editors_is_no_mistake() -> None:
    assert found(json.dumps({"$schema": "deepspeed.schema.json", **FINE})) == []
    assert only('{"fp16": {"$schema": "x"}}').kind == "unknown-key"


# ------------------------------------------------------------------------------- releases, topology


@pytest.mark.parametrize(
    ("release", "kinds"), [("0.19.8", ["removed-key"]), ("0.19.6", []), ("0.18.9", [])]
)
def test_another_release_reads_other_keys(release: str, kinds: list[str]) -> None:
    text = json.dumps({**FINE, "sparse_gradients": False})
    assert [
        problem.kind for problem in found(text, release) if problem.key == "sparse_gradients"
    ] == kinds


def test_a_key_of_a_later_release_is_reported_as_such() -> None:
    text = json.dumps({**FINE, "expert_parallel": {"enabled": False}})
    (problem,) = [problem for problem in found(text, "0.18.9") if problem.key == "expert_parallel"]
    assert problem.kind == "key-of-another-release"
    assert "DeepSpeed 0.18.9 reads no such key" in problem.reason
    assert "or newer" in problem.fix


def test_a_release_without_a_table() -> None:
    with pytest.raises(UsageError, match=r"no table of DeepSpeed 0\.1\.2"):
        found("{}", "0.1.2")


def test_the_number_of_ranks_is_what_a_batch_is_held_against() -> None:
    text = json.dumps({**FINE, "train_micro_batch_size_per_gpu": 4})
    assert found(text) == []
    assert found(text, topology=Topology(world_size=2)) == []
    (problem,) = found(text, topology=Topology(world_size=3))
    assert (problem.kind, problem.key) == ("batch-arithmetic", "train_batch_size")


@pytest.mark.parametrize("release", [name for name in known_releases() if name >= "0.19.7"])
@pytest.mark.parametrize(
    "path", sorted((ROOT / "ds_configs/rendered").glob("*.json")), ids=lambda path: path.stem
)
def test_what_we_render_has_no_error(path: Path, release: str) -> None:
    """`train` needs 0.19.7 at least."""
    topology = Topology(world_size=8)
    problems = lint(
        parse_hjson(path.read_text(), name=path.name), release=release, topology=topology
    )
    assert [str(problem) for problem in problems if problem.severity == "error"] == []


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('{"optimizer": {"type": "FusedAdam"}}', 'set optimizer.type: "AdamW"'),
        ('{"optimizer": {"type": "DeepSpeedCPULion"}}', 'set optimizer.type: "Lion"'),
        ('{"optimizer": {"type": "MuAdamm"}}', 'set optimizer.type: "MuAdam"'),
        ('{"compile": {"backend": "inductor"}}', "remove it"),
        ('{"moe": {"enabled": true}}', "remove it"),
        ('{"wandb": {"enabled": true, "api_key": "x"}}', "remove it"),
        ('{"log": {"steps_per_print": 5}}', "write steps_per_print without this section around it"),
        (
            '{"optimizer": {"type": "Muon", "params": {"lr": 0.1, "ns_method": "gramm"}}}',
            "write gram, standard",
        ),
        (
            '{"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "cos_min_ratio": 1.5}}}',
            "write at most 1",
        ),
        (
            '{"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [-1.0]}}}',
            "write at least 0",
        ),
        ('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e19}}', "write a whole number"),
    ],
)
def test_what_is_reported_instead(text: str, fix: str) -> None:
    problems = lint(parse_hjson(text, name="x.json"))
    assert fix in [problem.fix for problem in problems if problem.severity == "error"]


def test_a_missing_parameter_names_the_schedule() -> None:
    problems = lint(
        parse_hjson('{"scheduler": {"type": "WarmupDecayLR", "params": {}}}', name="x.json")
    )
    assert "WarmupDecayLR does not work without it" in [problem.reason for problem in problems]
