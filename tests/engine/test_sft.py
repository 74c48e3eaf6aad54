"""Fine-tuning on conversations on two ranks, against plain PyTorch with what transformers makes of
chats and models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import framework
from framework.checkpoint.huggingface import published_problems
from framework.cli import main
from framework.commands.export import export
from framework.commands.generate import main as generate
from framework.config.load import config_from_values
from framework.data.order import epoch_order
from framework.engine.weights import find_weights, put_weights
from framework.recipes.text.conversations import build
from framework.recipes.text.rows import DOCUMENTED
from framework.setup.user_code import call_factory
from tests.engine.pipe_oracle import plain_run
from tests.launched import fewer, rarely, series, train_cases
from tests.recipes.text.chats import CHATS, MARKED, write_chats, write_tokenizer

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="transformers comes with the dev extra")

NUM_STEPS, SIZE, LENGTH, LR = fewer(6, of=20), 4, 250, 0.3
_SHAPE = {"vocab_size": 420, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_OURS = {
    "vocab_size": 420,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_size": 48,
    "max_positions": 256,
}
_OURS |= {
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
_OURS |= {"num_kv_heads": 2, "norm_eps": 1e-6, "dropout": 0.0}
_LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
# Run -> whether rows are packed, whether the model is ours, sections.
RUNS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    **{f"z{stage}": (False, False, {"zero": {"stage": stage}}) for stage in (1, 3)},
    "packed-z1": (True, False, {"zero": {"stage": 1}}),
    "packed-z3": (True, False, {"zero": {"stage": 3}, "training": {"recompute_every": 0}}),
    "accumulated": (False, False, {"zero": {"stage": 2}, "batch": {"micro_size": 1}}),
    "ours-z3": (False, True, {"zero": {"stage": 3}}),
    "ours-packed": (True, True, {"zero": {"stage": 2}, "training": {"recompute_every": 1}}),
    "ours-packed-tensor": (True, True, {"zero": {"stage": 1}, "parallel": {"tensor": 2}}),
    **{
        f"{name}-sequence": (packed, ours, {**sections, "parallel": {"sequence": 2}})
        for name, packed, ours, sections in (
            ("padded", False, False, {"zero": {"stage": 2}, "batch": {"micro_size": 2}}),
            ("packed", True, False, {"zero": {"stage": 3}, "batch": {"micro_size": 2}}),
            ("lora-packed", True, False, {"zero": {"stage": 2}, "training": {"lora": _LORA}}),
            ("ours-packed", True, True, {"zero": {"stage": 1}, "training": {"recompute_every": 1}}),
        )
    },
    "pipe": (False, False, {"parallel": {"pipe": 2}, "batch": {"micro_size": 2}}),
    "packed-pipe": (
        True,
        False,
        {"parallel": {"pipe": 2}, "batch": {"micro_size": 1}, "zero": {"stage": 1}},
    ),
    "ours-packed-pipe": (
        True,
        True,
        {
            "parallel": {"pipe": 2},
            "batch": {"micro_size": 1},
            "zero": {"stage": 1},
            "training": {"recompute_every": 2},
        },
    ),
    "lora-z0": (False, False, {"training": {"lora": _LORA}}),
    "lora-z3": (False, False, {"zero": {"stage": 3}, "training": {"lora": _LORA}}),
    "lora-packed": (True, False, {"zero": {"stage": 3}, "training": {"lora": _LORA}}),
}
# With --exhaustive: of each, others hold the model, its rows and the stage.
RARE: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "z0": (False, False, {}),
    "ours-packed-z3": (True, True, {"zero": {"stage": 3}}),
    "ours-pipe": (False, True, {"parallel": {"pipe": 2}, "batch": {"micro_size": 2}}),
}

_ENCODER = {"vocab_size": 261, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # type: ignore[dict-item]
_BERT = {
    "vocab_size": 261,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_size": 48,
    "max_positions": 64,
}
# Run -> whether the model is ours, its ZeRO stage, pipeline and tensor size.
CLASSIFIERS = {
    "classes-z0": (False, 0, {}),
    "classes-z3": (False, 3, {}),
    "bert-z1": (True, 1, {}),
    "bert-z3": (True, 3, {}),
    "bert-tensor": (True, 0, {"tensor": 2}),
}


def classifier(root: Path, name: str) -> dict[str, Any]:
    is_ours, stage, parallel = CLASSIFIERS[name]
    place = {"pretrained_model_name_or_path": str(root / "bert-classes")}
    model = {
        "target": "transformers:AutoModelForSequenceClassification.from_pretrained",
        "args": place,
    }
    ours = {"kind": "bert", **_BERT, "num_classes": 8, "dropout": 0.0}
    return {
        "run": {"name": name, "output_dir": str(root)},
        "model": ours if is_ours else model,
        "data": {"kind": "labelled_text", "sequence_length": 64},
        "task": {"kind": "classification"},
        "batch": {"global_size": 16, "micro_size": 8 if not parallel else 16},
        "zero": {"stage": stage},
        "parallel": parallel,
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "checkpoint": {"init_weights": str(root / "bert-classes")} if is_ours else {},
        "training": {"max_steps": NUM_STEPS, "log_every": 1},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }


_SHARED: dict[str, Any] = {"parallel": {"pipe": 2, "sequence": 2}, "batch": {"micro_size": 1}}
# On four ranks: stages that tensor groups divide, or whose ranks share sequences.
FOUR: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "ours-packed-pipe-tensor": (
        True,
        True,
        {
            "parallel": {"pipe": 2, "tensor": 2},
            "batch": {"micro_size": 1},
            "zero": {"stage": 1},
        },
    ),
    "packed-pipe-sequence": (True, False, {**_SHARED, "zero": {"stage": 1}}),
    "lora-packed-pipe-sequence": (True, False, {**_SHARED, "training": {"lora": _LORA}}),
}


def config(root: Path, name: str) -> dict[str, Any]:
    packed, is_ours, sections = (RUNS | RARE | FOUR)[name]
    place = {"pretrained_model_name_or_path": str(root / "base")}
    theirs = {
        "model": {"target": "transformers:AutoModelForCausalLM.from_pretrained", "args": place}
    }
    ours = {"model": {"kind": "gpt", **_OURS}, "checkpoint": {"init_weights": str(root / "base")}}
    data = {
        "path": str(root / "chats.jsonl"),
        "tokenizer": str(root / "base"),
        "sequence_length": LENGTH,
    }
    made: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(root)},
        **(ours if is_ours else theirs),
        "data": {"kind": "conversations", "eval_fraction": 0.0, "packing": packed, **data},
        "task": {"kind": "causal_lm"},
        "batch": {"global_size": SIZE},
        "optimizer": {"kind": "sgd", "lr": LR},
        "training": {"max_steps": NUM_STEPS, "log_every": 1, "clip_grad_norm": 1.0},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }
    return made | {key: {**made.get(key, {}), **section} for key, section in sections.items()}


@pytest.fixture(scope="module")
def runs(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sft")
    write_chats(root / "chats.jsonl")
    torch.manual_seed(5)
    described = transformers.LlamaConfig(
        **_SHAPE,
        intermediate_size=48,
        num_key_value_heads=2,
        initializer_range=0.1,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(described).save_pretrained(root / "base")
    write_tokenizer(root / "base", MARKED)
    mixing = config(root, "packed-z1")
    mixing["run"]["name"] = "mixing"
    mixing["model"] = {"target": "tests.jobs.mixing:Mixing"}
    for name, folder in (
        ("BertForPreTraining", "bert"),
        ("BertForSequenceClassification", "bert-classes"),
    ):
        described = transformers.BertConfig(
            **_ENCODER,
            intermediate_size=48,
            max_position_embeddings=64,
            num_labels=8,
            initializer_range=0.1,
        )
        getattr(transformers, name)(described).save_pretrained(root / folder)
    drops = classifier(root, "classes-z0")
    drops["run"]["name"], drops["training"]["max_steps"] = "drops", 1
    drops["model"]["args"]["hidden_dropout_prob"] = 0.5
    cases = [
        *(config(root, name) for name in RUNS | (RARE if exhaustive else {})),
        mixing,
        *(classifier(root, name) for name in CLASSIFIERS),
        drops,
    ]
    train_cases(cases, num_ranks=2, folder=root)
    return root


def samples(root: Path, *, packed: bool) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tokens and labels of the conversations of every sample; transformers finds tokens and
    marks.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "base")
    found = []
    for chat in CHATS:
        made = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, marks = torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"])
        found.append([(ids[: LENGTH + 1], torch.where(marks == 1, ids, -100)[: LENGTH + 1])])
    if not packed:
        return found
    of = {tuple(one[0][0][:-1].tolist()): one[0] for one in found}
    values = config(root, "packed-z1")["data"]
    rows = build(**{key: value for key, value in values.items() if key != "kind"}).train
    found = []
    for number in range(len(rows)):
        inputs, targets = rows[number]
        bounds = [*torch.nonzero(inputs["position_ids"] == 0).flatten().tolist(), LENGTH]
        parts = [(inputs["input_ids"][a:b], targets[a:b]) for a, b in pairwise(bounds)]
        found.append(
            [of[tuple(ids.tolist())] for ids, labels in parts if bool((labels >= 0).any())]
        )
    assert sum(map(len, found)) == len(CHATS)
    return found


_plain: dict[tuple[bool, bool], list[float]] = {}


def plain(root: Path, *, packed: bool, lora: bool) -> list[float]:
    """Losses of plain PyTorch: every conversation alone, the step's nats over the answers' tokens
    of all.
    """
    if (packed, lora) in _plain:
        return _plain[packed, lora]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(root / "base").train()
    if lora:
        from framework.config.training import LoRA
        from framework.models.adapters import add_adapters

        model = add_adapters(model, LoRA.model_validate(_LORA), seed=0)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, losses, given = (
        torch.optim.SGD(weights, LR),
        list[float](),
        samples(root, packed=packed),
    )
    for step in range(NUM_STEPS):
        epoch, place = divmod(step, len(given) // SIZE)
        order = epoch_order(len(given), seed=0, epoch=epoch, shuffle=True)[
            place * SIZE : (place + 1) * SIZE
        ]
        nats, count = torch.zeros(()), 0
        for ids, labels in (one for number in order.tolist() for one in given[number]):
            logits = model(input_ids=ids[None]).logits[0, :-1]
            nats = nats + cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] >= 0).sum())
        optimizer.zero_grad()
        (nats / count).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append((nats.detach() / count).item())
    assert losses[-1] < losses[0] - (0.02 if lora else 0.3), (
        "it must learn, or equality says nothing"
    )
    _plain[packed, lora] = losses
    return losses


@pytest.mark.parametrize("name", [*RUNS, *rarely(RARE)])
def test_losses_are_those_of_plain_pytorch_with_transformers(name: str, runs: Path) -> None:
    packed, _, sections = (RUNS | RARE)[name]
    expected = plain(runs, packed=packed, lora="lora" in sections.get("training", {}))
    assert [*series(runs / name, "train/loss").values()] == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def on_four(runs: Path) -> Path:
    train_cases([config(runs, name) for name in FOUR], num_ranks=4, folder=runs)
    return runs


@pytest.mark.parametrize("name", FOUR)
def test_divided_stages_keep_texts_of_a_row_apart(name: str, on_four: Path) -> None:
    expected = plain(on_four, packed=True, lora="lora" in name)
    found = [*series(on_four / name, "train/loss").values()]
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_model_that_mixes_packed_conversations_is_refused(runs: Path) -> None:
    stated = (runs / "mixing.error").read_text(encoding="utf-8")
    assert "data.packing = true" in stated
    assert "[packing-not-separated]" in stated


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_of_texts_are_learnt_as_in_plain_pytorch(name: str, runs: Path) -> None:
    """Our BERT has the losses of transformers', with its weights."""
    values = classifier(runs, "classes-z0")
    if "classes" not in _measured:
        losses, measured, _ = plain_run(values, micro_size=8, num_steps=NUM_STEPS)
        assert losses[-1] < losses[0] - 0.1, "it must learn, or equality says nothing"
        _measured["classes"] = losses, measured
    losses, measured = _measured["classes"]
    assert [*series(runs / name, "train/loss").values()] == pytest.approx(losses, abs=1e-5)
    for metric in ("loss", "accuracy"):
        assert series(runs / name, f"eval/{metric}")[NUM_STEPS] == pytest.approx(
            measured[metric], abs=1e-5
        )
    assert abs(series(runs / "drops", "train/loss")[1] - losses[0]) > 1e-3, (
        "from_pretrained gives it in evaluation mode"
    )


@torch.no_grad()
def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model.eval()(**inputs)
    return getattr(found, "logits", found)


INPUTS = {"input_ids": torch.arange(3, 63).view(3, 20)}
OF_BERT = {
    **INPUTS,
    "token_type_ids": torch.zeros(3, 20).long(),
    "attention_mask": torch.ones(3, 20).long(),
}


@pytest.mark.parametrize(
    "name", ["z3", "ours-packed", "lora-z3", "packed-z1", "classes-z3", "bert-z3"]
)
def test_a_folder_for_the_hub_is_whole(
    name: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own doors load model, tokenizer and pipeline; huggingface_hub reads the
    card.
    """
    from huggingface_hub import ModelCard, metadata_load

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which its pipelines would set
    has_classes, out = name in CLASSIFIERS, tmp_path / "out"
    export(str(runs / name), out, file_format="hf", trust=str(runs / name))
    export(str(runs / name), out, hf=True, force=True, trust=str(runs / name))
    kind = (
        transformers.AutoModelForSequenceClassification
        if has_classes
        else transformers.AutoModelForCausalLM
    )
    again, loading = kind.from_pretrained(out, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trained, inputs = framework.load(runs / name, trust=True), OF_BERT if has_classes else INPUTS
    assert torch.allclose(logits(again, inputs), logits(trained, inputs), atol=1e-5)
    assert not torch.allclose(
        logits(again, inputs),
        logits(kind.from_pretrained(runs / ("bert-classes" if has_classes else "base")), inputs),
        atol=1e-3,
    )
    tokenizer, card = (
        transformers.AutoTokenizer.from_pretrained(out),
        ModelCard.load(out / "README.md"),
    )
    head = metadata_load(out / "README.md")
    assert card.data.library_name == head["library_name"] == "transformers"
    assert card.data.pipeline_tag == ("text-classification" if has_classes else "text-generation")
    assert "base_model" not in head, "a folder of this machine is none of the Hub's"
    assert "`base`" in card.text or has_classes
    if has_classes:
        accuracy = series(runs / name, "eval/accuracy")[NUM_STEPS]
        assert [
            one.metric_value for one in card.data.eval_results if one.metric_type == "accuracy"
        ] == [accuracy]
        (found,) = transformers.pipeline("text-classification", model=str(out), tokenizer=str(out))(
            ["Return a name."]
        )
        assert found["label"] in DOCUMENTED
        assert "classes" not in (out / "tokenizer_config.json").read_text(encoding="utf-8")
        assert tokenizer("ab")["input_ids"] == [257, *b"ab", 258]
        return
    theirs = transformers.AutoTokenizer.from_pretrained(runs / "base")
    assert tokenizer.apply_chat_template(CHATS[0]) == theirs.apply_chat_template(CHATS[0])
    assert again.generation_config.eos_token_id == [theirs.eos_token_id, 2], (
        "of answers, and the one of the base"
    )
    writes = transformers.pipeline("text-generation", model=str(out), tokenizer=str(out))
    (found,) = writes(CHATS[1][:1], max_new_tokens=3, do_sample=False)
    assert found["generated_text"][-1]["role"] == "assistant"
    assert ("adapters" in card.text) == name.startswith("lora")


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_predict_names_the_classes_of_lines(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, texts, out = (
        "bert-z1",
        ["Return the sine of x.", "Remove a file."],
        tmp_path / "out.jsonl",
    )
    (tmp_path / "lines.txt").write_text("\n".join(texts), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(runs / name), "lines.txt", "--lines", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    model = framework.load(runs / name, trust=True)
    for row, text in zip(rows, texts, strict=True):
        ids = torch.tensor([[257, *text.encode(), 258]])
        alone = {
            "input_ids": ids,
            "token_type_ids": torch.zeros_like(ids),
            "attention_mask": torch.ones_like(ids),
        }
        shares = logits(model, alone).softmax(1)[0]
        assert row["probabilities"] == pytest.approx(shares.tolist(), abs=1e-5)
        assert row["name"] == DOCUMENTED[row["class"]] == DOCUMENTED[int(shares.argmax())]


def test_answers_are_written_by_the_chat_template(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The likeliest tokens of transformers' own generate, for a question and for a whole chat."""
    asked = CHATS[1][0]["content"]
    for prompt, chat in ((asked, CHATS[1][:1]), (json.dumps(CHATS[0][:-1]), CHATS[0][:-1])):
        words = ["--prompt", prompt, "--temperature", "0", "--max-new-tokens", "8"]
        assert generate([str(runs / "ours-packed"), *words]) == 0
        written = capsys.readouterr().out.partition("\n")[2].removesuffix("\n")
        tokenizer = transformers.AutoTokenizer.from_pretrained(runs / "base")
        given = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        model, ids = framework.load(runs / "ours-packed"), given
        for _ in range(8):
            following = logits(model, {"input_ids": ids})[:, -1:, : len(tokenizer)].argmax(-1)
            if int(following) == tokenizer.eos_token_id:
                break
            ids = torch.cat((ids, following), 1)
        assert written == tokenizer.decode(ids[0, given.shape[1] :], skip_special_tokens=True)


def test_a_published_bert_gets_a_head_for_classes(runs: Path) -> None:
    values = classifier(runs, "bert-z1") | {"checkpoint": {"init_weights": str(runs / "bert")}}
    config = config_from_values(values)
    (problem,) = published_problems(config)
    assert (problem.kind, problem.severity) == ("weights-partial", "warning")
    assert "classes.output.weight" in problem.reason
    assert "pooler" not in problem.reason
    model, found = (
        call_factory(config.model.factory(), key="model"),
        find_weights(str(runs / "bert"), model=config.model),
    )
    put_weights(model, found, source="test")  # type: ignore[arg-type]
    base = transformers.BertModel.from_pretrained(runs / "bert").eval()
    pooled = base(**OF_BERT).pooler_output
    ours = model.eval().get_submodule("classes").output
    torch.testing.assert_close(model(**OF_BERT), ours(pooled), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["ours-packed", "lora-z0", "classes-z0", *rarely(("z1", "bert-tensor"))]
)
def test_a_program_of_torch_export_computes_the_same(name: str, runs: Path, tmp_path: Path) -> None:
    """On fewer and more samples and tokens than its example had."""
    export(str(runs / name), tmp_path / "out", file_format="torch_export", trust=str(runs / name))
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    trained, inputs = (
        framework.load(runs / name, trust=True),
        OF_BERT if name in CLASSIFIERS else INPUTS,
    )
    for rows in (1, 3):
        part = {key: value[:rows] for key, value in inputs.items()}
        with torch.no_grad():
            found = program(**part) if name == "classes-z0" else program(*part.values())
        torch.testing.assert_close(
            getattr(found, "logits", found), logits(trained, part), atol=1e-5, rtol=1e-5
        )


_measured: dict[str, tuple[list[float], dict[str, float]]] = {}
