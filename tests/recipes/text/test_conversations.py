"""Conversations as tokens: the answers are learnt and nothing else, and packed rows compute what
single ones do.
"""

from __future__ import annotations

import cProfile
import json
import pickle
import pstats
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from framework.errors import ConfigError
from framework.recipes.language_models.gpt import GPT
from framework.recipes.text.conversations import Conversations, best_fit, build
from framework.tasks.causal_lm import CausalLM
from tests.launched import job_environment
from tests.recipes.text.chats import CHATS, FORGETS, MARKED, PLAIN, write_chats, write_tokenizer

ANSWERS = [
    [message["content"] for message in chat if message["role"] == "assistant"] for chat in CHATS
]
SHAPE: dict[str, Any] = {
    "vocab_size": 410,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 48,
    "max_positions": 600,
}
LLAMA = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}


def conversations(path: str, **options: Any) -> Conversations:
    found = build(path, **{"eval_fraction": 0.0, "sequence_length": 600} | options).train
    assert isinstance(found, Conversations)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="transformers comes with the dev extra")
    made = tmp_path_factory.mktemp("chats")
    write_chats(made / "chats.jsonl")
    for name, template in {"plain": PLAIN, "marked": MARKED, "forgets": FORGETS}.items():
        write_tokenizer(made / name, template)
    return made


@pytest.mark.parametrize(("name", "end"), [("plain", "<|im_end|>\n"), ("marked", "<|im_end|>")])
def test_the_answers_are_learnt_and_nothing_else(folder: Path, name: str, end: str) -> None:
    """Ids and marks are transformers' own; where the template has no marks, the text is held by
    hand.
    """
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder / name)
    data = conversations(str(folder / "chats.jsonl"), tokenizer=str(folder / name))
    assert len(data) == len(CHATS)
    for (ids, targets), chat, answers in zip(
        map(data.__getitem__, range(len(data))), CHATS, ANSWERS, strict=True
    ):
        marked = {"return_dict": True, "return_assistant_tokens_mask": name == "marked"}
        expected = theirs.apply_chat_template(chat, tokenize=True, **marked)
        assert [*ids.tolist(), expected["input_ids"][-1]] == expected["input_ids"]
        learnt = targets[targets >= 0]
        assert theirs.decode(learnt) == "".join(answer + end for answer in answers)
        where = torch.tensor(expected["input_ids"][1:])
        assert torch.equal(targets, torch.where(targets >= 0, where, -100))
        if name == "marked":
            assert (targets >= 0).tolist() == [bool(one) for one in expected["assistant_masks"][1:]]


def test_bytes_need_no_tokenizer(tmp_path: Path) -> None:
    data = conversations(write_chats(tmp_path / "chats.jsonl"), sequence_length=2000)
    for number, answers in enumerate(ANSWERS):
        ids, targets = data[number]
        learnt = targets[targets >= 0].tolist()
        parts = (
            "".join(chr(one) if one < 256 else "\0" for one in learnt).encode("latin-1").decode()
        )
        assert parts == "".join(f"{answer}\0" for answer in answers)
        assert (
            bytes(one for one in ids.tolist() if one < 256)
            .decode()
            .startswith(f"{CHATS[number][0]['role']}: ")
        )
    assert data.vocab_size == 261


def test_every_form_is_the_same_conversation(tmp_path: Path) -> None:
    asks, answers = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}
    forms = [
        {"messages": [asks, answers]},
        {"prompt": "2 + 2?", "completion": "4."},
        {"prompt": [asks], "completion": [answers]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4."}]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, forms)), encoding="utf-8")
    data = conversations(str(tmp_path / "rows.jsonl"))
    found = [[part.tolist() for part in data[number]] for number in range(len(forms))]
    assert found == [found[0]] * len(forms)
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"content": "no role"}]}\n', encoding="utf-8"
    )
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: it has neither messages .* \[rows-not-read\]"
    ):
        build(str(tmp_path / "rows.jsonl"))
    for empty in (
        {"messages": [asks, {"role": "assistant", "text": "4."}]},
        {"prompt": "2 + 2?", "completion": None},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "text": "4."}]},
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(empty), encoding="utf-8")
        with pytest.raises(
            ConfigError,
            match=r"rows\.jsonl:1: message 2, of role assistant, has no content; .*-read\]",
        ):
            build(str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text("{]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1 is no JSON object; .* \[rows-not-read\]"):
        build(str(tmp_path / "rows.jsonl"))


def test_a_template_that_forgets_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = str(folder / "chats.jsonl")
    with pytest.raises(
        ConfigError, match=r"chats\.jsonl:1: up to message 3 .* \[chat-template-not-prefix\]"
    ):
        build(path, tokenizer=str(folder / "forgets"))
    assert len(conversations(path, tokenizer=str(folder / "forgets"), chat_template=MARKED)) == len(
        CHATS
    )
    (tmp_path / "own.jinja").write_text("{{ raise_exception('only for two') }}", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"fails on .*chats\.jsonl:1: .*only for two; .* \[chat-template-wrong\]"
    ):
        build(path, chat_template=str(tmp_path / "own.jinja"))
    for given, kind in (
        (str(tmp_path / "none.jinja"), "chat-template-missing"),
        ("{% for %}", "chat-template-wrong"),
    ):
        with pytest.raises(ConfigError, match=rf"\[{kind}\]"):
            build(path, chat_template=given)


def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": "x" * size}, {"role": "assistant", "content": "y"}]
        for size in (5, 35, 90)
    ]
    chats[1][1]["content"] = "y" * 50
    path = write_chats(tmp_path / "chats.jsonl", chats)
    cut = conversations(path, sequence_length=63)
    assert [len(cut[number][0]) for number in range(len(cut))] == [25, 63]
    assert cut.stated.startswith("training: 2 of 3 conversations; ")
    assert cut.stated.endswith(
        "; 2 too long, cut after 64 tokens; 1 without an answer there, left out"
    )
    dropped = conversations(path, sequence_length=63, too_long="drop")
    assert len(dropped) == 1
    assert (
        dropped.stated
        == "training: 1 of 3 conversations; 2 of 26 tokens are learnt; 2 too long, left out"
    )
    with pytest.raises(ConfigError, match=r"\[nothing-to-learn\]"):
        build(path, sequence_length=8)


def texts_of(inputs: Any) -> Iterator[torch.Tensor]:
    """The texts of a packed row, and its padding."""
    bounds = [*torch.nonzero(inputs["position_ids"] == 0).flatten().tolist(), 600]
    for start, end in pairwise(bounds):
        yield inputs["input_ids"][start:end]


def test_rows_hold_every_conversation_once(folder: Path) -> None:
    lengths = [7, 30, 12, 12, 5, 18, 20, 1, 25]
    order, starts = best_fit(lengths, 30)
    rows = [order[start:end] for start, end in pairwise(starts)]
    assert sorted(order) == list(range(len(lengths)))
    sums = [sum(lengths[one] for one in row) for row in rows]
    assert max(sums) <= 30
    assert len(rows) == -(-sum(lengths) // 30)  # none could be fewer
    path, tokenizer = str(folder / "chats.jsonl"), str(folder / "plain")
    single = conversations(path, tokenizer=tokenizer)
    packed = conversations(path, tokenizer=tokenizer, packing=True)
    found = []
    for number in range(len(packed)):
        inputs, targets = packed[number]
        ids, places = inputs["input_ids"], inputs["position_ids"]
        assert ids.shape == places.shape == targets.shape == (600,)
        bounds = [*torch.nonzero(places == 0).flatten().tolist(), 600]
        found += [(ids[a:b].tolist(), targets[a:b].tolist()) for a, b in pairwise(bounds)]
    whole = [tuple(part.tolist() for part in single[number]) for number in range(len(single))]
    assert sorted(one for one in found if any(two >= 0 for two in one[1])) == sorted(whole)
    assert len(packed) < len(single)
    again = pickle.loads(pickle.dumps(packed))
    assert torch.equal(again[0][1], packed[0][1])
    pairs = sum(len(ids) ** 2 for row in range(len(packed)) for ids in texts_of(packed[row][0]))
    assert packed.texts_per_row == pytest.approx(600 * 600 * len(packed) / pairs)
    assert packed.texts_per_row > 1
    assert single.texts_per_row == 1


def models() -> dict[str, Any]:
    transformers = pytest.importorskip(
        "transformers", reason="transformers comes with the dev extra"
    )
    values = {
        "vocab_size": 410,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    llama = transformers.LlamaConfig(
        **values, intermediate_size=48, num_key_value_heads=2, use_cache=False
    )
    gpt2 = transformers.GPT2Config(
        use_cache=False,
        vocab_size=410,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return {
        "gpt": lambda: GPT.of(**SHAPE),
        "gpt-rotary": lambda: GPT.of(**SHAPE, **LLAMA),
        "llama": lambda: transformers.LlamaForCausalLM(llama),
        "gpt2": lambda: transformers.GPT2LMHeadModel(gpt2),
    }


def test_a_batch_of_packed_rows_is_its_rows(folder: Path) -> None:
    """And it takes as many calls of numpy as a batch of one row."""
    chats = conversations(
        str(folder / "chats.jsonl"), tokenizer=str(folder / "plain"), packing=True
    )
    last = len(chats) - 1
    for indices in ([last], [0, last, 0], list(range(len(chats)))):
        inputs, targets = chats.__getitems__(indices).fields
        expected, expected_targets = default_collate([chats[index] for index in indices])
        assert list(inputs) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(inputs[name], tensor), name
            assert inputs[name].dtype == tensor.dtype
        assert torch.equal(targets, expected_targets)
        assert targets.dtype == expected_targets.dtype

    def calls(indices: list[int]) -> int:
        """Count the calls of functions, of C and of Python."""
        profile = cProfile.Profile()
        profile.runcall(chats.__getitems__, indices)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls([0]) == calls([0, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("name", ["gpt", "gpt-rotary", "llama", "gpt2"])
def test_packed_rows_compute_what_single_conversations_do(folder: Path, name: str) -> None:
    torch.manual_seed(3)
    model, task = models()[name]().eval(), CausalLM()
    path, options = str(folder / "chats.jsonl"), {"tokenizer": str(folder / "plain")}
    single, packed = conversations(path, **options), conversations(path, **options, packing=True)
    single_batch = single.collate_fn([single[number] for number in range(len(single))])
    sums = []
    for batch in (single_batch, default_collate([packed[number] for number in range(len(packed))])):
        inputs, targets = task.split(batch)
        model.zero_grad()
        loss = task.loss(task.forward(model, inputs), targets)
        loss.value.backward()
        sums.append((loss.value.item(), int(loss.count), next(model.parameters()).grad.clone()))
    assert sums[0][0] == pytest.approx(sums[1][0], abs=1e-6)
    assert (
        sums[0][1] == sums[1][1] == sum(int((single[n][1] >= 0).sum()) for n in range(len(single)))
    )
    torch.testing.assert_close(sums[0][2], sums[1][2], atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_the_documentation_of_python_makes_conversations() -> None:
    splits = build(sequence_length=256)
    assert len(splits.train) > 300
    assert splits.evaluation is not None
    assert 0.05 < len(splits.evaluation) / len(splits.train) < 0.15


@pytest.mark.slow
def test_the_documentation_is_the_same_in_every_process() -> None:
    """Or no rank would have the samples of another, and no run could go on."""
    program = "import sys; from framework.recipes.text.rows import *; print(list(questions()), list(sentences()))"
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=job_environment(PYTHONHASHSEED=seed),
            capture_output=True,
            check=True,
            timeout=100,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert len(printed[0]) > 100_000
    assert b" at 0x" not in printed[0]
