"""Exports of every layout, read back by the safetensors library and by runs that start from
them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from framework.checkpoint.state.weight_files import INDEX, TIES, read_exported
from framework.commands.export import export, hf_names, main
from framework.config.load import config_from_values
from framework.engine.weights import put_weights
from framework.errors import ConfigError, FrameworkError, StorageError, UsageError, show_value
from framework.setup.trained import module_to_ask
from tests.commands.test_trust import forged
from tests.engine.saved_runs import RUNS, read_weights, run_config, saved, truth, write_tokens
from tests.engine.test_pipeline import GPT
from tests.jobs.tied_net import TiedNet
from tests.launched import job_environment, series, train_cases
from tests.warm_ranks import WarmRanks


@pytest.fixture(params=RUNS, ids="-".join)
def run(request: pytest.FixtureRequest) -> Path:
    fixture, name = request.param
    folder: Path = request.getfixturevalue(fixture)
    return folder / name


# Those of which every form of an export is written; of the others one file.
EVERY_FORM = {"tied-z2", "tied-z3", "gpt-bf16-z3", "resnet-fp32-z1", "llama-fp32-z3"}


@pytest.fixture
def tied(plain_runs: Path) -> Path:
    return plain_runs / "tied-z3"


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """As a stranger reads it: by the index alone."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert sum(map(len, files.values())) == len(index["weight_map"])
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
        for name, tensor in found.items()
    )


@pytest.mark.slow
class TestRealCheckpoints:
    def test_every_layout_becomes_what_the_engines_held(self, run: Path, tmp_path: Path) -> None:
        expected = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in truth(run).items()
        }
        once = {name: tensor for name, tensor in expected.items() if name != "there.weight"}
        export(str(run), tmp_path / "whole")
        assert same(read_weights(str(tmp_path / "whole")), expected)
        assert same(load_file(tmp_path / "whole" / "model.safetensors"), once)
        if run.name in EVERY_FORM:
            export(str(run), tmp_path / "shards", shard_bytes=20_000)
            export(str(run), tmp_path / "pickled", file_format="pt")
            assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
            for folder in ("shards", "pickled"):
                assert same(read_weights(str(tmp_path / folder)), expected), folder
            assert same(read_shards(tmp_path / "shards"), once)

    def test_transformers_computes_with_an_export_of_two_tensor_ranks(
        self, divided_runs: Path, tmp_path: Path
    ) -> None:
        """As our own model does with the same weights, which the ranks have never seen whole."""
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        source = divided_runs / "llama-fp32-z3"
        export(str(source), tmp_path / "out", hf=True)
        checkpoint = saved(source)
        ours = module_to_ask(
            checkpoint, config_from_values(checkpoint.manifest["config"]), average=False
        )
        shape = ours.shape
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.mlp_size,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_kv_heads,
                max_position_embeddings=shape.max_positions,
                rms_norm_eps=shape.norm_eps,
                attention_bias=shape.bias,
                mlp_bias=shape.bias,
                tie_word_embeddings=False,
            )
        ).eval()
        theirs.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
        tokens = torch.randint(
            shape.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1)
        )
        with torch.no_grad():
            assert torch.allclose(theirs(tokens).logits, ours(tokens), atol=1e-5)

    @pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
    def test_half_precision_is_rounded_from_the_fp32_copies(
        self, dtype: str, kind: torch.dtype, plain_runs: Path, tmp_path: Path
    ) -> None:
        for name in ("gpt-bf16-z3", "tied-z2"):
            export(str(plain_runs / name), tmp_path / name, dtype=dtype)
            held = truth(plain_runs / name)
            rounded = {
                key: value.to(kind) if value.is_floating_point() else value
                for key, value in held.items()
            }
            assert same(read_weights(str(tmp_path / name)), rounded)

    def test_the_file_states_where_it_comes_from(self, tied: Path, tmp_path: Path) -> None:
        export(str(tied), tmp_path / "out", dtype="bf16")
        with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as opened:
            stated = opened.metadata()
        assert json.loads(stated.pop(TIES)) == {"there.weight": "here.weight"}
        assert stated == {
            "format": "pt",
            "source": "tied-z3/global_step2",
            "step": "2",
            "dtype": "bf16",
        }

    def test_the_users_own_module_takes_it(self, tied: Path, tmp_path: Path) -> None:
        export(str(tied), tmp_path / "out")
        model, expected = TiedNet(), truth(tied)
        put_weights(model, read_weights(str(tmp_path / "out")), source="test")
        assert same(dict(model.state_dict()), expected)

    def test_a_damaged_checkpoint_is_not_exported(self, tied: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy" / saved(tied).tag
        copy.mkdir(parents=True)
        for path in saved(tied).path.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        file = next(copy.glob("*optim_states.pt"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(
            StorageError,
            match=rf"it is damaged: {file.name}: its content has changed .*\[weights-not-read\]",
        ):
            export(str(copy), tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]

    def test_nothing_is_replaced_by_accident(
        self, tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        out.mkdir()
        # an empty folder is nothing
        assert main([str(tied), str(out), "--shard-size", "20KB"]) == 0
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        assert capsys.readouterr().out.count("\n") == len(before)
        with pytest.raises(ConfigError, match=r"give --force to replace it \[export-exists\]"):
            main([str(tied), str(out)])
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        main([str(tied), str(out), "--force"])
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]
        (out / "thesis.tex").touch()
        with pytest.raises(
            ConfigError, match="it exists and is not an earlier export; name a new folder"
        ):
            main([str(tied), str(out), "--force"])
        with pytest.raises(ConfigError, match="it lies in the checkpoint"):
            main([str(tied), str(saved(tied).path / "out")])
        assert saved(tied).damage() == []
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    def test_names_of_hugging_face_are_the_models_own(self, tied: Path, tmp_path: Path) -> None:
        expected = {
            f"net.{name.replace('.', '_proj.')}" if "." in name else "net.scale": tensor
            for name, tensor in truth(tied).items()
        }
        assert len(expected) == len(truth(tied))
        for name, options in {
            "whole": {},
            "shards": {"shard_bytes": 20_000},
            "pt": {"file_format": "pt"},
        }.items():
            export(str(tied), tmp_path / name, hf=True, trust=str(tied), **options)  # type: ignore[arg-type]
            assert same(read_weights(str(tmp_path / name)), expected), name
        assert set(read_shards(tmp_path / "shards")) == set(expected) - {"net.there_proj.weight"}

    @pytest.mark.parametrize(
        ("names", "stated"),
        [
            ({"scale": "scale"}, r"lacks \S+ and \d+ more"),
            (
                dict.fromkeys((*TiedNet().state_dict(), "more"), "x"),
                r"gives \S+ and \S+ one name, x",
            ),
            (["scale"], "does not return a dict of text to text"),
            ({"scale": 3}, "does not return a dict of text to text"),
        ],
    )
    def test_names_that_are_not_whole_are_refused(
        self, names: Any, stated: str, tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TiedNet, "hf_names", lambda self: names)
        with pytest.raises(
            ConfigError,
            match=rf"--hf: hf_names\(\) of TiedNet ({stated}).*; correct it, .* \[hf-names-wrong\]",
        ):
            export(str(tied), tmp_path / "out", hf=True, trust=str(tied))
        assert list(tmp_path.iterdir()) == []

    def test_a_model_without_such_names_is_refused(
        self, tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(TiedNet, "hf_names")
        with pytest.raises(
            ConfigError, match=r"TiedNet has no method hf_names\(\); .* \[hf-names-missing\]"
        ):
            export(str(tied), tmp_path / "out", hf=True, trust=str(tied))
        other = forged(tmp_path / "run", {"model": {"kind": "gpt", "positions": "rotary"}})
        with pytest.raises(
            ConfigError,
            match=r"a gpt of this shape has no counterpart .*; leave --hf out \[hf-names-missing\]",
        ):
            hf_names(other, stored=["embed.weight"])

    def test_without_an_average_there_is_none_to_write(self, tied: Path, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError,
            match=r"--weights = ema: its run kept no moving average .* \[ema-not-kept\]",
        ):
            main([str(tied), str(tmp_path / "out"), "--weights", "ema"])
        assert list(tmp_path.iterdir()) == []

    def test_a_number_that_fp16_has_not_is_named(
        self, tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from framework.checkpoint.state.reader import MergedWeights

        read = MergedWeights.__getitem__
        monkeypatch.setattr(
            MergedWeights,
            "__getitem__",
            lambda self, name: read(self, name) * (1e6 if name == "scale" else 1),
        )
        with pytest.raises(
            ConfigError, match=r"scale = [0-9.]+: fp16 ends at 65504; .* \[export-overflow\]"
        ):
            export(str(tied), tmp_path / "out", dtype="fp16")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("pipe", "tensor", "stage"), [(1, 1, 3), (2, 1, 1), (1, 2, 3)])
def test_runs_start_from_an_export_as_from_the_checkpoint(
    pipe: int, tensor: int, stage: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """One step each: its loss is that of the weights it started from."""
    fixture, name = ("plain_runs", "gpt-bf16-z3") if tensor == 1 else ("divided_runs", "frozen-z3")
    source = request.getfixturevalue(fixture) / name
    export(str(source), tmp_path / "whole")
    export(str(source), tmp_path / "shards", shard_bytes=20_000)
    tokens, once = write_tokens(tmp_path), {"training": {"max_steps": 1, "log_every": 1}}
    whole = tmp_path / "whole"
    starts = {"checkpoint": str(source), "folder": str(whole), "shards": str(tmp_path / "shards")}
    if pipe == tensor == 1:
        starts |= {"file": str(whole / "model.safetensors"), "fresh": None}
    if tensor > 1:
        starts["undivided"] = str(whole)
    train_cases(
        [
            run_config(
                f"from-{name}",
                GPT,
                stage,
                once | {"checkpoint": {"init_weights": start}},
                tmp_path,
                tokens,
                num_ranks=2,
                pipe=pipe,
                tensor=1 if name == "undivided" else tensor,
            )
            for name, start in starts.items()
        ],
        num_ranks=2,
        folder=tmp_path,
    )
    losses = {name: series(tmp_path / f"from-{name}", "train/loss")[1] for name in starts}
    expected = losses["checkpoint"]
    assert losses.get("file", expected) == losses["folder"] == losses["shards"] == expected
    assert abs(losses.get("fresh", 0.0) - expected) > 1e-3
    assert losses.get("undivided", expected) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        (["one"], "the following arguments are required: OUT"),
        (["one", "two", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["one", "two", "--shard-size", "0"], "0 is not a size; write for example 500MB or 5GB"),
        (["one", "two", "--shard-size", "5 parsecs"], "5 parsecs is not a size"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], stated: str) -> None:
    with pytest.raises(UsageError) as caught:
        main(words)
    assert stated in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint as DeepSpeed writes it at stage 0, large enough that writing it out takes a
    moment.
    """
    folder = tmp_path / "raw" / "global_step1"
    folder.mkdir(parents=True)
    weights = {
        f"layer{number}.weight": torch.full((1 << 24,), float(number)) for number in range(4)
    }
    counters = {"global_steps": 1, "global_samples": 8, "skipped_steps": 0, "dp_world_size": 1}
    torch.save(
        {
            "module": weights,
            "buffer_names": [],
            "optimizer": None,
            "ds_config": {},
            "ds_version": "0.19.8",
            **counters,
        },
        folder / "mp_rank_00_model_states.pt",
    )
    return folder


def until_it_writes(out: Path, is_over: Callable[[], object]) -> None:
    """Wait until an export has begun to write."""
    deadline = time.monotonic() + 300
    while not list(out.parent.glob(".out.*")) and not is_over():
        assert time.monotonic() < deadline, "it does not begin to write"
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.timing
def test_an_export_that_is_asked_to_end_leaves_nothing(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "framework",
        "export",
        str(large),
        str(out),
        "--allow-unverified",
    ]
    with subprocess.Popen(
        command, env=job_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            until_it_writes(out, lambda: process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            printed, stated = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 143
    assert printed == b""  # DeepSpeed, when it is imported, would tell which device it found
    assert b"Traceback" not in stated
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.slow
@pytest.mark.timing
def test_what_a_killed_export_leaves_the_next_one_clears_away(
    warm: WarmRanks, large: Path, tmp_path: Path
) -> None:
    out, script = tmp_path / "out", tmp_path / "raw" / "run.py"
    script.write_text(
        "import sys\nfrom framework.cli import main\nsys.exit(main(sys.argv[1:]))\n",
        encoding="utf-8",
    )
    words = ["export", str(large), str(out), "--allow-unverified"]
    job = warm.start(words, num_ranks=1, folder=tmp_path / "raw" / "said", script=script)
    until_it_writes(out, job.is_over)
    job.kill(0)
    assert job.wait(120) == [-signal.SIGKILL], job.stated()
    assert len(list(tmp_path.glob(".out.*"))) == 1
    assert not out.exists()
    export(str(large), out, allow_unverified=True)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "raw"]


def test_an_earlier_export_that_was_set_aside_comes_back(tmp_path: Path) -> None:
    # no process has such a number
    earlier = tmp_path / f".out.{socket.gethostname()}.{2**22 + 1}.earlier"
    earlier.mkdir()
    (earlier / "model.safetensors").write_bytes(b"weights")
    kept = [
        tmp_path / f".out.{socket.gethostname()}.{os.getpid()}.tmp",
        tmp_path / f".out.elsewhere.{2**22 + 1}.tmp",
    ]
    for folder in kept:
        folder.mkdir()
    with pytest.raises(ConfigError, match=r"it exists; .*--force.*\[export-exists\]"):
        export(str(tmp_path / "nothing"), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"weights"
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "out"])


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    for source, reason in (
        (tmp_path, "there is no finished checkpoint"),
        (tmp_path / "nowhere", "there is no such folder"),
    ):
        with pytest.raises(ConfigError) as caught:
            export(str(source), tmp_path / "out")
        assert str(caught.value).startswith(f"CHECKPOINT = {show_value(str(source))}: {reason}")
        assert caught.value.exit_code == 78


def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    long = str(tmp_path / ("x" * 300))
    for words in ([long, str(tmp_path / "out")], [str(tmp_path), long]):
        with pytest.raises(StorageError, match="File name too long") as caught:
            main(words)
        assert "\n" not in str(caught.value)
    with pytest.raises(StorageError, match="File name too long"):
        read_weights(long)


class TestForeignFiles:
    """safetensors as others write them, and malformed ones."""

    def test_files_and_folders_of_the_library(self, tmp_path: Path) -> None:
        weights = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(3).bfloat16()}
        save_file(weights, tmp_path / "other.safetensors")
        assert same(read_weights(str(tmp_path / "other.safetensors")), weights)
        save_file(weights, tmp_path / "model.safetensors")
        assert same(read_weights(str(tmp_path)), weights)

    def write_index(self, folder: Path, content: Any) -> None:
        save_file({"a": torch.ones(2)}, folder / "one.safetensors")
        (folder / INDEX).write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
        )

    @pytest.mark.parametrize(
        ("content", "stated"),
        [
            ("{", "it is not an index of shards"),
            ("[" * 100_000, "it is not an index of shards"),
            ([], "it is not an index of shards"),
            (
                {"weight_map": {"a": "one.safetensors"}, "metadata": 3},
                "it is not an index of shards",
            ),
            (
                {"weight_map": {"a": "../one.safetensors"}},
                "'../one.safetensors' is not a file beside it",
            ),
            ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd' is not a file beside it"),
            (
                {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}},
                "b is in none of its shards",
            ),
            ({"weight_map": {"a": "two.safetensors"}}, "FileNotFoundError"),
        ],
    )
    def test_an_index_that_cannot_be_followed(
        self, content: Any, stated: str, tmp_path: Path
    ) -> None:
        self.write_index(tmp_path, content)
        with pytest.raises(StorageError) as caught:
            read_exported(tmp_path)
        assert stated in str(caught.value)
        assert str(caught.value).endswith("[weights-not-read]")
        assert "\n" not in str(caught.value)

    def test_ties_noted_under_the_former_name_of_the_project_are_read(self, tmp_path: Path) -> None:
        save_file(
            {"a": torch.ones(2)},
            tmp_path / "x.safetensors",
            metadata={"dsframework_ties": '{"c": "a"}'},
        )
        assert read_exported(tmp_path / "x.safetensors").keys() == {"a", "c"}

    def test_damaged_files_are_refused_wherever_they_are_cut(self, tmp_path: Path) -> None:
        file = tmp_path / "x.safetensors"
        save_file(
            {"a": torch.randn(20, 20), "b": torch.randn(7)}, file, metadata={TIES: '{"c": "a"}'}
        )
        whole = file.read_bytes()
        assert read_exported(file).keys() == {"a", "b", "c"}
        header_end = 8 + int.from_bytes(whole[:8], "little")
        cuts = [*range(header_end + 2), *range(header_end + 2, len(whole), 97)]
        wrong = [whole[:cut] for cut in cuts] + [
            b"\xff" * 8 + whole[8:],
            whole + b"more",
            whole.replace(b'"F32"', b'"F99"'),
        ]
        wrong += [
            whole.replace(b'"data_offsets":[0,', b'"data_offsets":[4,'),
            whole.replace(b'{\\"c\\"', b'[\\"c\\"'),
        ]
        for content in wrong:
            assert content != whole
            file.write_bytes(content)
            with pytest.raises(FrameworkError) as caught:
                read_exported(file)
            assert "\n" not in str(caught.value)
            assert str(caught.value).endswith("[weights-not-read]")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_the_upload_of_a_folder_for_the_hub_is_named_and_not_done(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from framework.commands import export as command

    monkeypatch.setattr(command, "export", lambda *_, **__: {name: 3})
    assert command.main(["runs/x", "my models/sft"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    upload = "to publish it: hf auth login; hf upload sft 'my models/sft'"
    assert last == (upload if name == "config.json" else f"my models/sft/{name}  3 bytes")
