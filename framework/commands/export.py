"""``export CHECKPOINT OUT``: the weights of a checkpoint of any layout, for other programs.

Names are the plain module's, or with ``--format hf`` what the model gives for Hugging
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
import shlex
import shutil
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from framework.commands.program import refuse_without_onnx, write_onnx, write_program
from framework.errors import EXIT_OK, ConfigError, StorageError, printable
from framework.setup.adapters import write_adapter
from framework.setup.trained import find_source, module_of, saved_config
from framework.setup.user_code import call_factory
from framework.system.arguments import add_step
from framework.system.command_parser import CommandParser
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
# names of the files that an export writes
_STEMS: Final = r"(adapter_)?(model|config)|generation_config|.*token.*|vocab|special_tokens_map"
_OURS: Final = re.compile(
    rf"({_STEMS}).*\.(safetensors|pt2?|json|onnx|onnx\.data)|README\.md|merges\.txt|.*\.jinja"
    r"|.*\.model"
)
_PLAIN: Final = "leave --hf out"
_WEIGHTS: Final = "export its weights: --format safetensors"
_ALONE: Final = "give --adapter, for the adapters alone"
_SECONDS_BETWEEN_LOOKS: Final = 0.5
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def main(words: Sequence[str]) -> int:
    """Export a checkpoint, and print the files with their bytes; returns the exit code, or raises
    what `export` raises.
    """
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
    if "config.json" in written:
        print(f"to publish it: hf auth login; hf upload {out.name} {shlex.quote(str(out))}")
    return EXIT_OK


def export(
    source: str,
    out: Path,
    *,
    step: str | None = None,
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
        step: of the run folder: a number, or ``best``.
        weights: trained, or ema for their moving average.
        dtype: fp32, bf16 or fp16, of every floating-point tensor.
        shard_bytes: largest size of a file.
        file_format: safetensors; torch or pt for one file that `torch.load` reads; hf for `hf`; or
            torch_export for a program of `torch.export`; onnx for a file of ONNX.
        force: replace `out` where it is an earlier export.
        hf: ready for Hugging Face's Hub, with the names that the model's own `hf_names()` gives.
        trust: the folder of the checkpoint, where `hf`, and merging adapters, may run the code that
            its manifest names as ``model.target``.
        adapter: only the adapters, for peft.
        base: folder of the weights that the adapters were trained on; left out: the run's.
        allow_unverified: read a checkpoint that DeepSpeed wrote without a manifest.

    Raises:
        ConfigError: there is no such checkpoint, or OUT is taken.
        StorageError: the checkpoint is damaged, or OUT cannot be written.
    """
    _clear_left_over(out)
    _refuse_taken(out, force=force)
    hf = hf or file_format == "hf"
    checkpoint = find_source(source, step=step, allow_unverified=allow_unverified)
    _refuse_inside(out, checkpoint.path)
    merged = MergedWeights(checkpoint, average=weights == "ema")
    if adapter:
        with _complete_folder(out) as folder:
            return _write_adapter(folder, merged, dtype=_DTYPES[dtype])
    if file_format in ("torch_export", "onnx"):
        return _write_program(
            out,
            checkpoint,
            average=weights == "ema",
            dtype=_DTYPES[dtype],
            file_format=file_format,
            trust=trust,
            base=base,
        )
    tensors, stored, ties = _plain_weights(merged, average=weights == "ema", trust=trust, base=base)
    names = dict[str, str]()
    described = dict[str, Any]()
    if hf:
        tensors, stored, names, described = _for_the_hub(merged, tensors, stored, trust=trust)
        ties = _renamed_ties(ties, names)
    file_entries = entries(stored, dtype=_DTYPES[dtype], names=names)
    num_bytes = sum(entry.num_bytes for entry in file_entries)
    with _complete_folder(out) as folder, _showing_progress(folder, num_bytes):
        written = dict[str, int]()
        if hf:
            written = write_hub_files(
                folder, checkpoint, _config(checkpoint), described, dtype=_DTYPES[dtype]
            )
        if file_format in ("torch", "pt"):
            written[PICKLED] = write_pt(folder / PICKLED, tensors, file_entries, ties=ties)
            return written
        metadata = _metadata(merged.checkpoint, dtype=dtype, weights=weights, ties=ties)
        shards = split(file_entries, shard_bytes=shard_bytes)
        return written | write_safetensors(folder, tensors, shards, metadata=metadata)


def _renamed_ties(ties: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the ties of weights that have names in Hugging Face's model, under those."""
    renamed = {}
    for name, first in ties.items():
        if name in names:
            renamed[names[name]] = names.get(first, first)
    return renamed


def _write_program(
    out: Path,
    checkpoint: SavedCheckpoint,
    *,
    average: bool,
    dtype: torch.dtype,
    file_format: str,
    trust: str | None,
    base: str | None,
) -> dict[str, int]:
    """Write the program, or the ONNX, of the checkpoint's model; returns file -> bytes."""
    if file_format == "onnx":
        refuse_without_onnx()
    config = saved_config(
        checkpoint, "model", "data", "task", trust=trust, key="--format", otherwise=_WEIGHTS
    )
    model = module_of(checkpoint, config, average=average, base=base).to(dtype)
    with _complete_folder(out) as folder:
        if file_format == "onnx":
            return write_onnx(folder, model, config)
        return write_program(folder, model, config)


def _for_the_hub(
    merged: MergedWeights, tensors: Any, stored: Any, *, trust: str | None
) -> tuple[Any, Any, dict[str, str], dict[str, Any]]:
    """Return tensors, their shapes, name in the model -> name in Hugging Face's model, and its
    config.json; our own models' tensors take the shapes that theirs have.
    """
    form = form_of(_config(merged.checkpoint).model)
    if not form:
        names, described = hf_names(merged.checkpoint, stored=stored, trust=trust)
        return tensors, stored, names, described
    tensors, stored = as_theirs(tensors, stored, form)
    return tensors, stored, form.table["weights"], form.described()


def _metadata(
    checkpoint: SavedCheckpoint, *, dtype: str, weights: str, ties: Mapping[str, str]
) -> dict[str, str]:
    """Return the text that a safetensors file has about its origin."""
    run = checkpoint.manifest["config"]["run"]
    metadata = {
        "source": f"{run['name']}/{checkpoint.tag}",
        "step": str(checkpoint.step),
        "dtype": dtype,
    }
    if weights != "trained":
        metadata["weights"] = weights
    if ties:
        metadata[TIES] = json.dumps(ties)
    return metadata


def _write_adapter(folder: Path, merged: MergedWeights, *, dtype: torch.dtype) -> dict[str, int]:
    """Write the adapters alone; returns file -> bytes. ConfigError if there are none."""
    if not merged.checkpoint.has_adapters:
        reason = "its run trained all weights (training.lora)"
        fix = "leave --adapter out"
        raise ConfigError.of("no-adapters", reason, fix, "--adapter", str(merged.checkpoint.path))
    merged.refuse_lacking()
    return write_adapter(folder, merged, dtype=dtype)


def _plain_weights(
    merged: MergedWeights, *, average: bool, trust: str | None, base: str | None
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any], Mapping[str, str]]:
    """Return plain name -> tensor, with adapters merged in; name -> shape and type; and further
    name of a tied weight -> its first name.
    """
    if not merged.checkpoint.has_adapters:
        merged.refuse_lacking()
        return merged, merged.stored, merged.ties
    config = saved_config(
        merged.checkpoint, "model", trust=trust, key="training.lora", otherwise=_ALONE
    )
    module = module_of(merged.checkpoint, config, average=average, base=base)
    tensors, ties = each_once(module.state_dict())
    return tensors, tensors, ties


def each_once(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a state dict without repetitions, and further names of some -> the
    first name.
    """
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    first_names: dict[Any, str] = {}
    for name, tensor in state.items():
        if tensor.numel():
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if memory in first_names:
                ties[name] = first_names[memory]
                continue
            first_names[memory] = name
        tensors[name] = tensor
    return tensors, ties


@contextlib.contextmanager
def _complete_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` to write to. It takes the name `out` if the block ends without an
    error; otherwise all is as it was.
    """
    prefix = f".{out.name}.{socket.gethostname()}.{os.getpid()}"
    folder = out.with_name(f"{prefix}.tmp")
    earlier = out.with_name(f"{prefix}.earlier")
    try:
        folder.mkdir(parents=True)
        yield folder
        sync_folder(folder)
        if out.exists():
            out.rename(earlier)
        folder.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        reason = f"{out}: the export cannot be written ({error.strerror or error})"
        raise StorageError(
            f"{reason}; free space or name another folder [export-not-written]"
        ) from error
    finally:
        if earlier.exists() and not out.exists():
            earlier.rename(out)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(earlier, ignore_errors=True)


@contextlib.contextmanager
def _showing_progress(folder: Path, num_bytes: int) -> Iterator[None]:
    """Show on a terminal how much is written, by the sizes of the folder's files."""
    if not sys.stderr.isatty():
        yield
        return
    is_over = Event()

    def show() -> None:
        while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
            with contextlib.suppress(OSError):  # renamed meanwhile
                done = sum(path.stat().st_size for path in folder.iterdir())
                line = f"\rexport: {done / 1e9:.1f} of {num_bytes / 1e9:.1f} GB"
                print(line, end="", file=sys.stderr, flush=True)
        print(f"\r{'':40}\r", end="", file=sys.stderr, flush=True)

    thread = Thread(target=show, name="export-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _clear_left_over(out: Path) -> None:
    """Remove folders that exports of ended processes of this host left beside OUT, and restore an
    earlier export that one had set aside.
    """
    pattern = re.compile(
        rf"\.{re.escape(out.name)}\.{re.escape(socket.gethostname())}\.(\d+)\.(tmp|earlier)"
    )
    # a folder of another user, or a file system that cannot be written: the export reports it
    with contextlib.suppress(OSError):
        for path in list(out.parent.iterdir()):
            match = pattern.fullmatch(path.name)
            if match is not None and not path.is_symlink():
                _clear_folder(path, out, process=match[1], is_earlier=match[2] == "earlier")


def _clear_folder(path: Path, out: Path, *, process: str, is_earlier: bool) -> None:
    """Remove a folder left beside OUT, or restore it if it is the earlier export and OUT is gone;
    nothing if its process still runs.
    """
    if Path("/proc", process).exists():
        return
    if is_earlier and not out.exists():
        path.rename(out)
    else:
        shutil.rmtree(path)


def _refuse_taken(out: Path, *, force: bool) -> None:
    """Refuse an OUT that exists, unless it is empty, or an earlier export and `force`: a mistyped
    name must not cost a folder of other things.
    """
    if not (out.exists() or out.is_symlink()) or _is_empty_folder(out):
        return
    if not _is_export(out):
        raise _taken(out, "it exists and is not an earlier export", "name a new folder")
    if not force:
        raise _taken(out, "it exists", "name a new folder, or give --force to replace it")


def _refuse_inside(out: Path, checkpoint: Path) -> None:
    """Refuse a folder within the checkpoint."""
    if checkpoint.resolve() in (out.resolve(), *out.resolve().parents):
        reason = "it lies in the checkpoint, where every further file counts as damage"
        raise _taken(out, reason, "name a folder elsewhere")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _is_export(path: Path) -> bool:
    """Check that a folder has only files with names that an export writes."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(_OURS.fullmatch(inner.name) for inner in path.iterdir())


def _taken(out: Path, reason: str, fix: str) -> ConfigError:
    return ConfigError.of("export-exists", reason, fix, key="OUT", value=str(out))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="dsf export",
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
    add_step(parser)
    as_trained = "as trained, or their moving average, training.ema (trained)"
    option("--weights", choices=("trained", "ema"), default="trained", help=as_trained)
    option("--dtype", choices=tuple(_DTYPES), default="fp32", help="type of the numbers (fp32)")
    option(
        "--shard-size", dest="shard_bytes", type=_size, default=5 * 10**9, metavar="SIZE", help=size
    )
    formats = ("safetensors", "torch", "hf", "torch_export", "onnx", "pt")
    kind = (
        "safetensors; torch (or pt): for torch.load; hf: a folder for transformers and the "
        "Hub; torch_export: a program; onnx: for ONNX runtimes"
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
        "torch_export, onnx or adapters"
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
    """Read a size such as 500MB; returns bytes."""
    size = 0
    match = _SIZE.fullmatch(text.strip())
    if match and match[2].upper() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size; write for example 500MB or 5GB")
    return size


# The config of a checkpoint, with errors for ``--hf``.
_config = partial(saved_config, key="--hf", otherwise=_PLAIN, kind="hf-names-missing")


def hf_names(
    checkpoint: SavedCheckpoint, *, stored: Collection[str], trust: str | None = None
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return name in the model -> Hugging Face's, for all stored weights and their further names,
    and the config.json of a model of transformers, or an empty dict.

    The model is built on torch's meta device, and its `hf_names()` is called; `trust` as for
    `saved_config`.

    Raises:
        ConfigError: the model cannot be built, has no such method, or the names are incomplete;
            kinds ``target-not-trusted``, ``hf-names-missing`` and ``hf-names-wrong``.
    """

    def refused(kind: str, reason: str, fix: str = _PLAIN) -> ConfigError:
        return ConfigError.of(
            f"hf-names-{kind}", reason, fix, key="--hf", file=str(checkpoint.path)
        )

    model: Any = _config(checkpoint, "model", trust=trust).model
    if not model.is_own_code:
        raise refused("missing", f"a {model.kind} of this shape has no counterpart in transformers")
    module = _module_for_names(model)
    make_names = getattr(module, "hf_names", None)
    if not callable(make_names):
        if _is_of_transformers(type(module)):
            return {name: name for name in stored}, json.loads(module.config.to_json_string())
        fix = "give it one that returns {its name of a weight: Hugging Face's}, or leave --hf out"
        raise refused("missing", f"{type(module).__name__} has no method hf_names()", fix)
    names = make_names()
    wrong = _fault_of(names, stored)
    if wrong:
        raise refused(
            "wrong",
            f"hf_names() of {type(module).__name__} {wrong}",
            "correct it, or leave --hf out",
        )
    return dict(names), {}


def _module_for_names(model: Any) -> Any:
    """Build the module of a model's section, without memory for its weights if that is possible."""
    try:
        with torch.device("meta"):
            return call_factory(model.factory(), key="model")
    except ConfigError:  # transformers reads no files on that device
        return call_factory(model.factory(), key="model")


def _is_of_transformers(module_class: type) -> bool:
    packages = {parent.__module__.partition(".")[0] for parent in module_class.__mro__}
    return "transformers" in packages


def _is_text_to_text(names: Any) -> bool:
    if not isinstance(names, Mapping):
        return False
    return all(isinstance(name, str) and isinstance(hf, str) for name, hf in names.items())


def _fault_of(names: Any, stored: Collection[str]) -> str:
    """Describe what is wrong with the result of `hf_names()`; empty if nothing is."""
    if not _is_text_to_text(names):
        return (
            "does not return a dict of text to text: its architecture has no counterpart, or "
            "it is not one"
        )
    missing = [name for name in stored if name not in names]
    if missing:
        return f"lacks {_first_of(missing)}"
    return _double_name(names, stored)


def _first_of(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    if len(names) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    return names[0]


def _double_name(names: Mapping[str, str], stored: Collection[str]) -> str:
    """Describe a name that two weights have; empty if each has its own."""
    first_names: dict[str, str] = {}
    for name in stored:
        hf_name = names[name]
        if hf_name in first_names:
            return f"gives {first_names[hf_name]} and {name} one name, {hf_name}"
        first_names[hf_name] = name
    return ""
