"""`generate` writes what the plain module says, from checkpoints of any layout."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from framework.cli import main
from framework.commands.generate import as_text, find_gpt, sample
from framework.config.load import config_from_values, load_config
from framework.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from framework.engine.weights import checkpoint_weights
from framework.errors import FrameworkError, show_value
from framework.recipes.language_models.gpt import GPT
from framework.recipes.text.prepare import prepare
from framework.setup import trained
from framework.setup.user_code import call_factory
from tests.launched import ROOT, job_environment, rarely, read_metrics, train_cases

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "max_positions": 8,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "mlp_size": 32,
}
END = 49


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(3)
    model = GPT.of(**SHAPE).eval()
    for parameter in model.parameters():  # far enough from uniform that samples differ
        parameter.data.mul_(8.0)
    return model


def drawn(model: torch.nn.Module, **changes: Any) -> list[int]:
    options = {
        "max_new_tokens": 30,
        "temperature": 1.0,
        "top_k": None,
        "seed": 0,
        "window": 8,
        "vocab_size": 50,
        "end": -1,
    } | changes
    return [token for (token,) in sample(model, [[1, 2, 3]], **options)]


def test_greedy_is_the_likeliest_token_of_the_window_step_by_step(model: torch.nn.Module) -> None:
    tokens = [1, 2, 3]
    for _ in range(30):
        tokens.append(int(model(torch.tensor([tokens[-8:]]))[0, -1].argmax()))
    assert drawn(model, temperature=0.0) == tokens[3:]
    assert len(set(tokens)) > 3
    assert drawn(model, temperature=1e-9) == tokens[3:]
    assert drawn(model, top_k=1) == tokens[3:]


def test_a_seed_names_a_sample(model: torch.nn.Module) -> None:
    assert drawn(model, seed=5) == drawn(model, seed=5)
    assert drawn(model, seed=5) != drawn(model, seed=6)


@pytest.mark.slow
def test_samples_follow_the_softmax_of_the_divided_logits(model: torch.nn.Module) -> None:
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([[1, 2, 3]]))[0, -1] / 2.0, dim=0)
    counts = torch.zeros(50)
    for seed in range(2000):
        counts[drawn(model, max_new_tokens=1, temperature=2.0, seed=seed)[0]] += 1
    # The distance of 2000 draws from their own distribution is below sqrt(50 / 2000) / 2 = 0.08 in
    # the mean.
    assert float((counts / 2000 - expected).abs().sum() / 2) < 0.1
    assert float((torch.full((50,), 0.02) - expected).abs().sum() / 2) > 0.2


def test_only_the_likeliest_k_are_drawn(model: torch.nn.Module) -> None:
    with torch.no_grad():
        best = set(torch.topk(model(torch.tensor([[1, 2, 3]]))[0, -1], 3).indices.tolist())
    found = {
        drawn(model, max_new_tokens=1, temperature=5.0, top_k=3, seed=seed)[0] for seed in range(60)
    }
    assert found == best


def test_the_end_token_ends_it_and_what_stands_for_nothing_is_never_drawn(
    model: torch.nn.Module,
) -> None:
    whole = drawn(model, temperature=0.0)
    end = whole[5]
    assert drawn(model, temperature=0.0, end=end) == whole[: whole.index(end)]
    assert max(drawn(model, temperature=5.0, max_new_tokens=200, vocab_size=7)) < 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "kv_heads", "moe"),
    [
        ("learned", 4, None),
        ("rotary", 2, None),
        ("rotary", 4, {"num_experts": 4, "min_capacity": 1}),
    ],
)
def test_what_is_remembered_changes_no_token(
    positions: str, kv_heads: int, moe: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths at once, past the window, with rows that end: each as alone, and
    as without memory.
    """
    torch.manual_seed(3)
    shape = SHAPE | {
        "num_heads": 4,
        "num_kv_heads": kv_heads,
        "positions": positions,
        "max_positions": 20,
    }
    made = GPT.of(moe, **shape).eval()
    monkeypatch.setattr(trained, "module_of", lambda *_, **__: made)
    # experts with room for all
    model = trained.module_to_ask(cast(Any, None), cast(Any, None), average=False)
    for parameter in model.parameters():
        parameter.data.mul_(8.0)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].numel()))
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    for temperature in (0.0, 1.0):
        asked: dict[str, Any] = {
            "max_new_tokens": 30,
            "temperature": temperature,
            "top_k": None,
            "seed": 5,
        }
        terms: dict[str, Any] = {"window": 20, "vocab_size": 50, "end": 7}
        calls.clear()
        rows = list(sample(model, prompts, **asked, **terms))
        assert calls[:14] == [21, *[3] * 13]  # the prompts, then one token of each row
        assert rows == list(sample(model, prompts, **asked, **terms, remembers=False))
        for row, prompt in enumerate(prompts):
            alone = sample(model, [prompt], **asked | {"seed": 5 + row}, **terms)
            assert [token for (token,) in alone] == [
                tokens[row] for tokens in rows if tokens[row] is not None
            ]


def test_text_comes_in_whole_characters() -> None:
    tokenizer = ByteTokenizer()
    text = "a€\N{GRINNING FACE}b".encode()
    assert list(as_text(iter(text), tokenizer.decode, after=[65])) == [
        "a",
        "€",
        "\N{GRINNING FACE}",
        "b",
        "",
    ]
    cut_off = list(as_text(iter(text[:3]), tokenizer.decode, after=[65]))
    assert "".join(cut_off) == "a\N{REPLACEMENT CHARACTER}"


def test_pieces_of_a_library_tokenizer_add_up() -> None:
    text = b"the cat and the hat: \xe2\x82\xac 5, na\xc3\xafve " * 20
    tokenizer = train_bpe([text], vocab_size=300)
    (ids,) = tokenizer.encode([text])
    pieces = list(as_text(iter(ids.tolist()[1:]), tokenizer.decode, after=ids.tolist()[:1]))
    assert tokenizer.decode(ids.tolist()[:1]) + "".join(pieces) == text.decode()
    assert len(pieces) > 100


# ---------------------------------------------------------------------------------------------------- real checkpoints
STEPS = 6
# What weights of the other layouts become tests/commands/test_export.py holds.
LAYOUTS = ("z0", "z3", "pipe-z0", "pipe-z1", "bpe")
MORE_LAYOUTS = ("z1", "z2", "pipe-bf16")
_RUN: dict[str, Any] = {
    "model": {
        "kind": "gpt",
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "max_positions": 24,
        "vocab_size": 400,
    },
    "task": {"kind": "causal_lm"},
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"kind": "adamw", "lr": 3e-3},
    "training": {"max_steps": STEPS},
    "evaluation": {"at_end": False},
    "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Path:
    """Trained in every layout; one with a tokenizer of its own, one that is no GPT."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_bytes(Path(os.__file__).read_bytes()[:20_000])
    prepare(
        [str(folder / "text.txt")],
        str(folder / "tokens"),
        bpe_vocab_size=350,
        blank_lines_split=True,
    )

    def case(name: str, *, path: str | None = None, **sections: Any) -> dict[str, Any]:
        data = {"kind": "text", "sequence_length": 24, "path": path}
        return {**_RUN, "run": {"name": name, "output_dir": str(folder)}, "data": data, **sections}

    plain = [
        case(f"z{stage}", zero={"stage": stage})
        for stage in ((0, 1, 2, 3) if exhaustive else (0, 3))
    ]
    plain += [case("bpe", path=str(folder / "tokens"))]
    plain += [
        {
            "run": {"name": "lenet", "output_dir": str(folder)},
            "training": {"max_steps": 1},
            "monitors": _RUN["monitors"],
        }
    ]
    plain += [
        shipped(name) for name in ("gpt_tiny", "gpt_zero3", "bert_pretrain", "bert_pretrain_512")
    ]
    train_cases(plain, num_ranks=2, folder=folder)
    piped = [
        case(f"pipe-z{stage}", parallel={"pipe": 2}, zero={"stage": stage}) for stage in (0, 1)
    ]
    if exhaustive:
        piped += [
            case("pipe-bf16", parallel={"pipe": 2}, zero={"stage": 1}, precision={"dtype": "bf16"})
        ]
    piped += [shipped("gpt_pipeline", *MOVED[1:])]
    train_cases(piped, num_ranks=2, folder=folder)
    return folder


def shipped(name: str, *settings: str) -> dict[str, Any]:
    """A shipped config as it stands, of the smallest size and one step."""
    small = [
        "model.size=tiny",
        "training.max_steps=1",
        "batch.global_size=4",
        "batch.micro_size=2",
        "evaluation.max_samples=2",
        "monitors.tensorboard=false",
        "monitors.progress=off",
    ]
    small += ["data.sequence_length=128"] if name.startswith("gpt") else []
    # the last one of a key
    given = {setting.partition("=")[0]: setting for setting in (*small, *settings)}
    return load_config(ROOT / f"ds_configs/{name}.yaml", list(given.values())).to_dict()


# The command of docs/pipeline.md: its config and settings.
MOVED = re.findall(
    r"^ *dsf train (.*checkpoint\.init_weights=.*?) --num_gpus 2$",
    (ROOT / "docs/pipeline.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)[0].split()


@pytest.mark.slow
def test_the_shipped_configs_of_language_models_train(runs: Path, capsys: Capture) -> None:
    """The second part of BERT's pre-training starts from the first, and the pipeline from the plain
    run, as the page says.
    """
    assert MOVED[0] == "ds_configs/gpt_pipeline.yaml"
    losses = {
        name: read_metrics(runs / "runs" / name)[-1]
        for name in ("gpt_tiny", "gpt_zero3", "gpt_pipeline", "bert_pretrain", "bert_pretrain_512")
    }
    assert all(2.0 < row["eval/loss"] < 13.0 for row in losses.values()), losses
    assert abs(losses["gpt_pipeline"]["eval/loss"] - losses["gpt_tiny"]["eval/loss"]) < 0.5
    for name in ("gpt_zero3", "gpt_pipeline"):
        assert (
            main(
                [
                    "generate",
                    str(runs / "runs" / name),
                    "--prompt",
                    "import",
                    "--max-new-tokens",
                    "4",
                ]
            )
            == 0
        )
        assert capsys.readouterr().out.startswith("import")


Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, *rarely(MORE_LAYOUTS)])
def test_what_is_printed_is_what_the_plain_module_computes(
    name: str, runs: Path, capsys: Capture
) -> None:
    checkpoint = find_gpt(str(runs / name))
    model = call_factory(
        config_from_values(checkpoint.manifest["config"]).model.factory(), key="model"
    ).eval()
    model.load_state_dict(checkpoint_weights(checkpoint))
    tokenizer = (
        load_tokenizer(str(runs / "tokens/tokenizer.json")) if name == "bpe" else ByteTokenizer()
    )
    prompt = "import os\n    return "
    tokens = tokenizer.encode([prompt.encode()])[0].tolist()
    num_given = len(tokens)
    for _ in range(40):
        token = int(model(torch.tensor([tokens[-24:]]))[0, -1, : tokenizer.vocab_size].argmax())
        if token == tokenizer.special.end:
            break
        tokens.append(token)
    assert len(tokens) > num_given
    assert (
        main(
            [
                "generate",
                str(runs / name),
                "--prompt",
                prompt,
                "--temperature",
                "0",
                "--max-new-tokens",
                "40",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out == f"{tokenizer.decode(tokens)}\n"
    assert err == ""


@pytest.mark.slow
def test_all_layouts_write_the_same(runs: Path, capsys: Capture) -> None:
    """They trained with the same seed on the same batches, up to rounding: greedily they say the
    same for a while.
    """
    stated = []
    for name in ("z0", "z3", "pipe-z0", "pipe-z1"):
        main(
            [
                "generate",
                str(runs / name / f"checkpoints/global_step{STEPS}"),
                "--prompt",
                "def ",
                "--temperature",
                "0",
                "--max-new-tokens",
                "8",
            ]
        )
        stated.append(capsys.readouterr().out)
    assert len(set(stated[:2])) == 1
    assert len(set(stated[2:])) == 1


@pytest.mark.slow
def test_a_seed_names_a_sample_on_the_command_line(runs: Path, capsys: Capture) -> None:
    stated = []
    for seed in ("1", "1", "2"):
        assert main(["generate", str(runs / "z3"), "--seed", seed, "--max-new-tokens", "50"]) == 0
        stated.append(capsys.readouterr().out)
    assert stated[0] == stated[1] != stated[2]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux, where the other end is closed
        return b""


@pytest.mark.slow
def test_a_command_of_its_own_and_a_terminal(runs: Path) -> None:
    """On a terminal nothing that a model draws can move the cursor."""
    words = [
        "generate",
        str(runs / "z0"),
        "--prompt",
        "x",
        "--temperature",
        "50",
        "--max-new-tokens",
        "300",
    ]
    terminal, other_end = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-m", "framework", *words],
        cwd=ROOT,
        env=job_environment(),
        stdout=other_end,
        stderr=subprocess.PIPE,
    )
    os.close(other_end)
    stated = b"".join(iter(lambda: _read(terminal), b""))
    assert job.wait(timeout=120) == 0
    assert job.stderr is not None
    assert job.stderr.read() == b""
    text = stated.decode(errors="replace").replace("\r\n", "\n")
    assert text.startswith("x")
    assert len(text) > 100
    assert not [
        character for character in text if not character.isprintable() and character not in "\n\t"
    ]


@pytest.mark.slow
def test_what_is_no_gpt_is_named(runs: Path, capsys: Capture) -> None:
    assert main(["generate", str(runs / "lenet")]) == 78
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"{runs}/lenet/checkpoints/global_step1: model.kind = lenet: only a GPT writes text, and this is another "
        "model; name a checkpoint of model.kind: gpt [not-a-gpt]\n"
    )


@pytest.mark.slow
def test_a_run_keeps_its_tokenizer(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token folder may move; without what the run has kept, the tokenizer can be named."""
    words = ["generate", str(runs / "bpe"), "--temperature", "0", "--max-new-tokens", "8"]
    assert main(words) == 0
    stated, kept = capsys.readouterr().out, runs / "bpe/tokenizer"
    (runs / "tokens").rename(runs / "elsewhere")
    try:
        assert main(words) == 0
        assert capsys.readouterr().out == stated
        monkeypatch.chdir(runs / "bpe/checkpoints")
        assert main(["generate", f"global_step{STEPS}", *words[2:]]) == 0, (
            "the run is above the folder that it is asked for in"
        )
        assert capsys.readouterr().out == stated
        kept.rename(runs / "kept")
        for named in (runs / "kept", runs / "elsewhere/tokenizer.json"):
            assert main([*words, "--tokenizer", str(named)]) == 0
            assert capsys.readouterr().out == stated
        assert main([*words, "--tokenizer", "bytes"]) == 0
        assert main([*words, "--tokenizer", "nowhere"]) == 78
        assert "--tokenizer = nowhere: there is no such file or folder" in capsys.readouterr().err
        assert main(words) == 78
    finally:
        (runs / "elsewhere").rename(runs / "tokens")
        (runs / "kept").rename(kept)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"data.path = {runs}/tokens: there is no folder" in err
    assert "or say --tokenizer [text-not-found]" in err


@pytest.mark.slow
def test_a_prompt_that_is_no_utf8(runs: Path, capsys: Capture) -> None:
    assert main(["generate", str(runs / "bpe"), "--prompt", "caf\udce9"]) == 78
    assert "[prompt-not-utf8]" in capsys.readouterr().err
    assert (
        main(["generate", str(runs / "z0"), "--prompt", "caf\udce9", "--max-new-tokens", "1"]) == 0
    )


def test_what_deepspeed_wrote_by_itself_needs_a_config(tmp_path: Path, capsys: Capture) -> None:
    values = {**_RUN, "run": {"name": "x"}, "data": {"kind": "text", "sequence_length": 24}}
    (tmp_path / "run.json").write_text(json.dumps(values))
    torch.manual_seed(1)
    model = call_factory(config_from_values(values).model.factory(), key="model").eval()
    folder = tmp_path / "global_step2"
    folder.mkdir()
    counters = {"global_steps": 2, "global_samples": 8, "skipped_steps": 0, "dp_world_size": 1}
    torch.save(
        {
            "module": model.state_dict(),
            "buffer_names": [],
            "optimizer": None,
            "ds_config": {},
            "ds_version": "0.19.8",
            **counters,
        },
        folder / "mp_rank_00_model_states.pt",
    )
    words = [
        "generate",
        str(folder),
        "--allow-unverified",
        "--config",
        str(tmp_path / "run.json"),
        "--prompt",
        "def ",
        "--temperature",
        "0",
        "--max-new-tokens",
        "5",
    ]
    assert main(words) == 0
    out, err = capsys.readouterr()
    tokens = list(b"def ")
    for _ in range(5):
        tokens.append(
            int(model(torch.tensor([tokens]))[0, -1, : ByteTokenizer().vocab_size].argmax())
        )
    assert out == f"{ByteTokenizer().decode(tokens)}\n"
    assert err.count("\n") == err.count("[checkpoint-unverified]") == 1
    assert main(words[:3]) == 78
    assert "give --config FILE" in capsys.readouterr().err


def test_there_is_nothing(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "there is no finished checkpoint"),
        (tmp_path / "auto", "there is no such folder"),
    ):
        with pytest.raises(
            FrameworkError, match=r"^CHECKPOINT = .*\[checkpoint-not-found\]"
        ) as caught:
            find_gpt(str(path))
        assert str(caught.value).startswith(
            f"CHECKPOINT = {show_value(str(path))}: {reason}; name a"
        )
        assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        ([], "the following arguments are required: CHECKPOINT"),
        (["x", "--temperature", "-1"], "'-1' is not a temperature from 0 up"),
        (["x", "--temperature", "nan"], "'nan' is not a temperature from 0 up"),
        (["x", "--top-k", "0"], "'0' is not a number from 1 to 999999999"),
        (["x", "--max-new-tokens", "many"], "'many' is not a number from 1"),
        (["x", "--seed", "-3"], "'-3' is not a whole number from 0 up"),
    ],
    ids=str,
)
def test_usage_ends_with_64_and_one_line(words: list[str], stated: str, capsys: Capture) -> None:
    assert main(["generate", *words]) == 64
    err = capsys.readouterr().err
    assert stated in err
    assert err.count("\n") == 1
