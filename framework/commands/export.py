"""``export CHECKPOINT OUT``: the weights of a checkpoint of any layout, for programs that know
nothing of it.

Names are those of the plain module, or with ``--format hf`` those that the model gives for Hugging
Face's loaders, in a folder ready for the Hub; fp32 copies are taken where the checkpoint has any.
Adapters are merged into the weights that they belong to, or with ``--adapter`` written by
themselves. OUT is a folder, which appears when it is complete and on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import torch

from framework.checkpoint.huggingface import form_of
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.reader import MergedWeights
from framework.checkpoint.state.weight_files import (
    PICKLED,
    TIES,
    as_theirs,
    entries,
    split,
    write_pt,
    write_safetensors,
)
from framework.commands.hub_folder import write_hub_files
from framework.commands.program import write_program
from framework.config.base import Target
from framework.errors import EXIT_OK, ConfigError, StorageError, printable
from framework.setup.adapters import write_adapter
from framework.setup.trained import find_source, module_of, saved_config
from framework.setup.user_code import call_factory
from framework.system.arguments import CommandParser
from framework.system.files import sync_folder
from framework.system.stopping import ending_in_good_order

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS: Final = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_OURS: Final = re.compile(
    r"((adapter_)?(model|config)|generation_config|.*token.*|vocab|special_tokens_map).*\.(safetensors|pt2?|json)"
    r"|README\.md|merges\.txt|.*\.jinja|.*\.model"
)
_PLAIN: Final = "leave --hf out"
_WEIGHTS: Final = "export its weights: --format safetensors"
_ALONE: Final = "give --adapter, for the adapters alone"
_SECONDS_BETWEEN_LOOKS: Final = 0.5
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code, or raises what `export` raises."""
    arguments = vars(_parse(words))
    source = arguments.pop("checkpoint")
    out = Path(arguments.pop("out"))
    try:
        with ending_in_good_order():
            written = export(source, out, **arguments)
    except OSError as error:
        reason = f"export: {error.filename or out}: {error.strerror or error} [export-not-written]"
        raise StorageError(reason) from error
    for name, num_bytes in written.items():
        print(printable(f"{out / name}  {num_bytes:,} bytes"))
    return EXIT_OK


def export(
    source: str,
    out: Path,
    *,
    weights: str = "trained",
    dtype: str = "fp32",
    shard_bytes: int = 5 * 10**9,
    file_format: str = "safetensors",
    force: bool = False,
    hf: bool = False,
    trust: str | None = None,
    adapter: bool = False,
    base: str | None = None,
    allow_unverified: bool = False,
) -> dict[str, int]:
    """Write the weights; returns file -> bytes.

    Args:
        source: a checkpoint, or a run folder: its newest checkpoint.
        weights: trained, or ema for their moving average.
        dtype: fp32, bf16 or fp16, of everything with a point.
        shard_bytes: largest size of a file.
        file_format: safetensors; torch or pt for one file that `torch.load` reads; hf for `hf`; or
            torch_export for a program of `torch.export`.
        force: replace `out` where it is an earlier export.
        hf: ready for Hugging Face's Hub, with the names that the model's own `hf_names()` gives.
        trust: the folder of the checkpoint, where `hf`, and merging adapters, may run the code that
            its manifest names as ``model.target``.
        adapter: only the adapters, for peft.
        base: where the weights are now that adapters were trained on; left out: where the run found
            them.
        allow_unverified: read a checkpoint that DeepSpeed wrote without a manifest.

    Raises:
        ConfigError: there is no such checkpoint, or OUT is taken.
        StorageError: the checkpoint is damaged, or OUT cannot be written.
    """
    _clear_left_over(out)
    _refuse_taken(out, force=force)
    hf |= file_format == "hf"
    checkpoint = find_source(source, allow_unverified=allow_unverified)
    if checkpoint.path.resolve() in (out.resolve(), *out.resolve().parents):
        reason = "it lies in the checkpoint, where every further file counts as damage"
        raise _taken(out, reason, "name a folder elsewhere")
    merged = MergedWeights(checkpoint, average=weights == "ema")
    if adapter:
        return _write(_adapter, out, merged, dtype=_DTYPES[dtype])
    if file_format == "torch_export":
        config = saved_config(
            checkpoint, "model", "data", "task", trust=trust, key="--format", otherwise=_WEIGHTS
        )
        model = module_of(checkpoint, config, average=weights == "ema", base=base).to(
            _DTYPES[dtype]
        )
        return _write(write_program, out, model, config)
    whole, stored, ties = _plain_weights(merged, average=weights == "ema", trust=trust, base=base)
    names = dict[str, str]()
    described = dict[str, Any]()
    if hf and (form := form_of(_config(merged.checkpoint).model)):
        whole, stored = as_theirs(whole, stored, form)
        names = form.table["weights"]
        described = form.described()
    elif hf:
        names, described = hf_names(merged.checkpoint, stored=stored, trust=trust)
    ties = {
        names.get(name, name): names.get(first, first)
        for name, first in ties.items()
        if name in names or not hf
    }
    found = entries(stored, dtype=_DTYPES[dtype], names=names)
    num_bytes = sum(entry.num_bytes for entry in found)
    with _appearing_whole(out) as aside, _showing_progress(aside, num_bytes):
        of_run = partial(
            write_hub_files, aside, checkpoint, described=described, dtype=_DTYPES[dtype]
        )
        if hf:
            written = of_run(_config(checkpoint))
        else:
            written = {}
        if file_format in ("torch", "pt"):
            return written | {PICKLED: write_pt(aside / PICKLED, whole, found, ties=ties)}
        run = merged.checkpoint.manifest["config"]["run"]
        metadata = {
            "source": f"{run['name']}/{merged.checkpoint.tag}",
            "step": str(merged.checkpoint.step),
        }
        metadata |= {"dtype": dtype} | ({"weights": weights} if weights != "trained" else {})
        metadata |= {TIES: json.dumps(ties)} if ties else {}
        return written | write_safetensors(
            aside, whole, split(found, shard_bytes=shard_bytes), metadata=metadata
        )


def _write(
    write: Callable[..., dict[str, int]], out: Path, *of: Any, **options: Any
) -> dict[str, int]:
    with _appearing_whole(out) as aside:
        return write(aside, *of, **options)


def _adapter(folder: Path, merged: MergedWeights, *, dtype: torch.dtype) -> dict[str, int]:
    if not merged.checkpoint.has_adapters:
        reason = "its run trained all weights (training.lora)"
        fix = "leave --adapter out"
        raise ConfigError.of("no-adapters", reason, fix, "--adapter", str(merged.checkpoint.path))
    merged.refuse_lacking()
    return write_adapter(folder, merged, dtype=dtype)


def _plain_weights(
    merged: MergedWeights, *, average: bool, trust: str | None, base: str | None
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any], Mapping[str, str]]:
    """The weights under plain names, their shapes and types, and further names; adapters are merged
    into them.
    """
    if not merged.checkpoint.has_adapters:
        merged.refuse_lacking()
        return merged, merged.stored, merged.ties
    config = saved_config(
        merged.checkpoint, "model", trust=trust, key="training.lora", otherwise=_ALONE
    )
    whole, ties = each_once(
        module_of(merged.checkpoint, config, average=average, base=base).state_dict()
    )
    return whole, whole, ties


def each_once(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a state dict, and further names of some of them -> the first name."""
    first: dict[Any, str] = {}
    places = {
        name: (one.data_ptr(), one.shape, one.stride())
        for name, one in state.items()
        if one.numel()
    }
    ties = {
        name: first[place]
        for name, place in places.items()
        if first.setdefault(place, name) != name
    }
    return {name: tensor for name, tensor in state.items() if name not in ties}, ties


@contextlib.contextmanager
def _appearing_whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write to, which takes its name when the block ends well; otherwise
    all is as it was.
    """
    aside, earlier = (
        out.with_name(f".{out.name}.{socket.gethostname()}.{os.getpid()}.{kind}")
        for kind in ("tmp", "earlier")
    )
    try:
        aside.mkdir(parents=True)
        yield aside
        sync_folder(aside)
        if out.exists():
            out.rename(earlier)
        aside.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        reason = f"{out}: the export cannot be written ({error.strerror or error})"
        raise StorageError(
            f"{reason}; free space or name another folder [export-not-written]"
        ) from error
    finally:
        if earlier.exists() and not out.exists():
            earlier.rename(out)
        for folder in (aside, earlier):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _showing_progress(folder: Path, num_bytes: int) -> Iterator[None]:
    """Show on a terminal how much of the files is written: their sizes say it, whoever writes
    them.
    """
    if not sys.stderr.isatty():
        yield
        return
    is_over = Event()

    def show() -> None:
        while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
            with contextlib.suppress(OSError):  # renamed meanwhile
                done = sum(path.stat().st_size for path in folder.iterdir())
                print(
                    f"\rexport: {done / 1e9:.1f} of {num_bytes / 1e9:.1f} GB",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)

    thread = Thread(target=show, name="export-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _clear_left_over(out: Path) -> None:
    """Remove what exports of ended processes of this host left beside OUT; restore what one had set
    aside.
    """
    pattern = re.compile(
        rf"\.{re.escape(out.name)}\.{re.escape(socket.gethostname())}\.(\d+)\.(tmp|earlier)"
    )
    # another user's, or a file system that cannot be written: the export will tell
    with contextlib.suppress(OSError):
        for path in list(out.parent.iterdir()):
            match = pattern.fullmatch(path.name)
            if match is None or Path("/proc", match[1]).exists() or path.is_symlink():
                continue
            if match[2] == "earlier" and not out.exists():
                path.rename(out)
            else:
                shutil.rmtree(path)


def _refuse_taken(out: Path, *, force: bool) -> None:
    """Whoever mistypes OUT must not lose a folder of other things."""
    if not (out.exists() or out.is_symlink()):
        return
    is_folder = out.is_dir() and not out.is_symlink()
    if is_folder:
        names = [path.name for path in out.iterdir()]
    else:
        names = [""]
    ours = all(_OURS.fullmatch(name) for name in names)
    if not names or (force and ours):
        return
    reason = "it exists" if ours else "it exists and is not an earlier export"
    fix = "name a new folder" + (", or give --force to replace it" if ours else "")
    raise _taken(out, reason, fix)


def _taken(out: Path, reason: str, fix: str) -> ConfigError:
    return ConfigError.of("export-exists", reason, fix, key="OUT", value=str(out))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m framework export",
        allow_abbrev=False,
        description="Write the weights of a checkpoint, of any layout, for other programs.",
    )
    option = parser.add_argument
    size = "largest file, such as 500MB (5GB)"
    option(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a .../global_step<N> folder, or a run folder: its newest one",
    )
    option("out", metavar="OUT", help="folder to be made")
    as_trained = "as trained, or their moving average, training.ema (trained)"
    option("--weights", choices=("trained", "ema"), default="trained", help=as_trained)
    option("--dtype", choices=tuple(_DTYPES), default="fp32", help="type of the numbers (fp32)")
    option(
        "--shard-size", dest="shard_bytes", type=_size, default=5 * 10**9, metavar="SIZE", help=size
    )
    formats = ("safetensors", "torch", "hf", "torch_export", "pt")
    kind = (
        "safetensors; torch (or pt): for torch.load; hf: a folder for transformers and the "
        "Hub; torch_export: a program"
    )
    option(
        "--format",
        choices=formats,
        default="safetensors",
        dest="file_format",
        help=f"{kind} (safetensors)",
    )
    option(
        "--hf",
        action="store_true",
        help="as --format hf; with --format pt only Hugging Face's names",
    )
    trust = (
        "the run folder or checkpoint whose targets may be imported and called, for hf, "
        "torch_export or adapters"
    )
    option("--trust", metavar="FOLDER", help=trust)
    option(
        "--adapter",
        action="store_true",
        help="only the adapters of training.lora, as peft loads them",
    )
    option(
        "--base",
        metavar="PATH",
        help="the weights that adapters were trained on (checkpoint.init_weights)",
    )
    option("--force", action="store_true", help="replace an earlier export")
    unverified = (
        "read what DeepSpeed wrote without a manifest: nothing tells whether its files are whole"
    )
    option("--allow-unverified", action="store_true", help=unverified)
    return parser.parse_args(words)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match and match[2].upper() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    else:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size; write for example 500MB or 5GB")
    return size


_config = partial(saved_config, key="--hf", otherwise=_PLAIN, kind="hf-names-missing")


def hf_names(
    checkpoint: SavedCheckpoint, *, stored: Collection[str], trust: str | None = None
) -> tuple[dict[str, str], dict[str, Any]]:
    """Its name -> Hugging Face's, for everything that is stored, and for further names of it; and
    the config.json of a model of transformers. The model is built on torch's meta device, and
    asked; `trust` as for `saved_config`.

    Raises:
        ConfigError: it cannot be built, has no such method, or its names are not whole; kinds
            ``target-not-trusted``, ``hf-names-missing`` and ``hf-names-wrong``.
    """

    def refused(kind: str, reason: str, fix: str = _PLAIN) -> ConfigError:
        return ConfigError.of(
            f"hf-names-{kind}", reason, fix, key="--hf", file=str(checkpoint.path)
        )

    model: Any = _config(checkpoint, "model", trust=trust).model
    if not isinstance(model, Target):
        raise refused("missing", f"a {model.kind} of this shape has no counterpart in transformers")
    try:
        with torch.device("meta"):
            built: Any = call_factory(model.factory(), key="model")
    except ConfigError:  # transformers reads no files there
        built = call_factory(model.factory(), key="model")
    asked = getattr(built, "hf_names", None)
    if not callable(asked):
        if any(cls.__module__.partition(".")[0] == "transformers" for cls in type(built).__mro__):
            return {name: name for name in stored}, json.loads(built.config.to_json_string())
        fix = "give it one that returns {its name of a weight: Hugging Face's}, or leave --hf out"
        raise refused("missing", f"{type(built).__name__} has no method hf_names()", fix)
    names = asked()
    wrong = _wrong(names, stored)
    if wrong:
        raise refused(
            "wrong", f"hf_names() of {type(built).__name__} {wrong}", "mend it, or leave --hf out"
        )
    return dict(names), {}


def _wrong(names: Any, stored: Collection[str]) -> str:
    """Describe what keeps the names from being used; empty where they can be."""
    if not isinstance(names, Mapping) or not all(
        isinstance(name, str) for pair in names.items() for name in pair
    ):
        return (
            "does not return a dict of text to text: its architecture has no counterpart, or "
            "it is not one"
        )
    missing = [name for name in stored if name not in names]
    if missing:
        return f"lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    first: dict[str, str] = {}
    for name in stored:
        if first.setdefault(names[name], name) != name:
            return f"gives {first[names[name]]} and {name} one name, {names[name]}"
    return ""
