"""Result of a dataset builder, or data handed over by a program: a training set, and one evaluation
set, or several by name, or none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from torch import Tensor

from framework.data.from_dataloader import taken_over
from framework.data.loaders import is_stream, num_samples_of
from framework.data.token_files import read_meta
from framework.data.tokens import Tokens
from framework.errors import ConfigError, Problem


@dataclass(frozen=True)
class Splits:
    """A training dataset, and one for evaluation, or several by name: samples by number, or
    streams; `taken`: what a `DataLoader` in their place says of workers, batches (`eval_size` of
    evaluation's) and shuffling.
    """

    train: Any
    evaluation: Any
    taken: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_train(self) -> int | None:
        """Training samples; None of a stream."""
        return num_samples_of(self.train)

    @property
    def evaluations(self) -> dict[str, Any]:
        """Evaluation datasets by name, which is empty where there is but one."""
        if isinstance(self.evaluation, Mapping):
            return dict(self.evaluation)
        return {} if self.evaluation is None else {"": self.evaluation}

    def by_name(self) -> dict[str, Any]:
        """All datasets: ``training``, ``evaluation`` or ``evaluation noisy``."""
        evaluations = self.evaluations.items()
        return {"training": self.train} | {
            f"evaluation {name}".rstrip(): each for name, each in evaluations
        }


def as_splits(result: object) -> Splits:
    """Accept what a user's `data.target` may return: a dataset, a tuple (training, evaluation or
    None), or a `Splits`; for evaluation there may be several datasets by name.

    Raises:
        ConfigError: kind ``data-target-result``, with every reason why the result cannot be trained
            on.
    """
    return _checked(*_pair(result, _RETURNED), _RETURNED)


def given_splits(train_data: object, eval_data: object = None) -> Splits:
    """Accept what `fit` was given: a dataset each, or the pair of both (or a `Splits`) as
    `train_data`.

    Raises:
        ConfigError: kind ``data-target-result`` as for `as_splits`; the problems name `train_data`
            and `eval_data`.
    """
    train, evaluation = _pair(train_data, _GIVEN)
    if evaluation is not None and eval_data is not None:
        reason = (
            "train_data is a pair (training, evaluation), so that there are two evaluation sets"
        )
        raise ConfigError.of("data-target-result", reason, "leave one of them out", "eval_data")
    return _checked(train, eval_data if evaluation is None else evaluation, _GIVEN)


@dataclass(frozen=True)
class _Door:
    """Entry that datasets came through, and the words for it in messages."""

    train_key: str
    eval_key: str
    give: str
    given: str


_RETURNED: Final = _Door("data.target", "data.target", "return", "returned")
_GIVEN: Final = _Door("train_data", "eval_data", "hand over", "handed over")


def _pair(result: object, door: _Door) -> tuple[Any, Any]:
    if isinstance(result, Splits):
        return result.train, result.evaluation
    if not isinstance(result, tuple):
        return result, None
    if len(result) == 2:
        return result
    reason = f"a tuple of {len(result)} was {door.given}"
    fix = f"{door.give} (training, evaluation)"
    raise ConfigError.of("data-target-result", reason, fix, door.train_key)


def _checked(train: Any, evaluation: Any, door: _Door) -> Splits:
    train, taken = taken_over(train, key=door.train_key, trains=True)
    problems = [_complaint(train, door, name="training")]
    splits = Splits(train, evaluation)
    if isinstance(evaluation, Mapping) and not evaluation:
        fix = f"{door.give} None in its place to train without evaluation"
        problems.append(
            Problem("data-target-result", "there is no evaluation set in it", fix, door.eval_key)
        )
    found = {}
    for name, given in splits.evaluations.items():
        if isinstance(evaluation, Mapping) and not (
            isinstance(name, str) and _NAME.fullmatch(name)
        ):
            reason = "this is no name of an evaluation set, as its metrics are eval/<name>/<metric>"
            fix = f"{door.give} names of letters, digits, '_', '-' and '.'"
            problems.append(Problem("data-target-result", reason, fix, door.eval_key, name))
        found[name], measured = taken_over(given, key=door.eval_key, trains=False)
        taken |= {"eval_size": measured["micro_size"]} if measured else {}
        problems.append(_complaint(found[name], door, name=f"evaluation {name}".rstrip()))
    if any(problems):
        raise ConfigError(filter(None, problems))
    return Splits(train, found if isinstance(evaluation, Mapping) else found.get(""), taken)


_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)


def _complaint(dataset: object, door: _Door, *, name: str) -> Problem | None:
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    wanted = (
        f"{door.give} a map-style dataset with __len__ and __getitem__, a stream with "
        "__iter__, or a tuple of two"
    )

    def problem(reason: str, fix: str = wanted) -> Problem:
        key = door.train_key if name == "training" else door.eval_key
        return Problem("data-target-result", f"the {name} set {reason}", fix, key)

    if hasattr(dataset, "__next__"):
        fix = (
            f"{door.give} an object whose __iter__ begins anew, such as a class with `def "
            "__iter__(self): yield ...`"
        )
        return problem(
            f"is an iterator ({kind}), which can be read once: no second pass, and no resume", fix
        )
    if is_stream(dataset):
        if getattr(dataset, "_distributed", None) is None:
            return None
        reason = f"({kind}) was divided over ranks (split_dataset_by_node), which the loader does"
        return problem(reason, f"{door.give} the whole stream")
    if dataset is None:
        shown = "None"
    else:
        shown = f"a {kind.removeprefix('builtins.')}"
    if isinstance(dataset, Tensor | np.ndarray):
        wrapped = "torch.utils.data.TensorDataset(inputs, targets)"
        return problem(
            f"is {shown}, not a dataset of samples (inputs, target)", f"{door.give} {wrapped}"
        )
    if isinstance(dataset, list) and dataset and not isinstance(dataset[0], tuple | list | dict):
        # Mostly [inputs, targets], or inputs alone: as a dataset they would be two samples, or
        # samples without a target.
        fix = (
            f"{door.give} a list of pairs (inputs, target), or "
            "torch.utils.data.TensorDataset(inputs, targets)"
        )
        return problem(
            f"is a list of {type(dataset[0]).__name__}, not of samples (inputs, target)", fix
        )
    # A tuple could be a mistyped pair, a dict a DatasetDict: guessing would train on the wrong
    # thing.
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, tuple | dict | str | bytes):
        return problem(f"is {shown}, not a dataset")
    try:
        if len(dataset):  # type: ignore[arg-type]
            return None
    except (TypeError, NotImplementedError):  # some classes define `__len__` only to raise in it
        return problem(f"({kind}) has no length")
    without = "None in its place to train without evaluation"
    return problem(
        f"({kind}) is empty",
        f"{door.give} {'at least one sample' if name == 'training' else without}",
    )


def tokens_sha256(dataset: Any) -> str | None:
    """A SHA-256 of the tokens behind a dataset, and of where their documents begin; None of what is
    no text.

    Of tokens in files it is made from the checksums that ``meta.json`` holds: the files are not
    read.

    Raises:
        ConfigError: ``meta.json`` is gone or damaged.
    """
    tokens = getattr(dataset, "tokens", None)
    if not isinstance(tokens, Tokens):
        return None
    if tokens.source is None:
        whole = hashlib.sha256(tokens.numbers.tobytes())
        whole.update(tokens.offsets.tobytes())
        return whole.hexdigest()
    place = tokens.source.numbers.parent
    _, meta = read_meta(str(place), "data.path")
    files = (
        meta.files[path.name].sha256 for path in (tokens.source.numbers, tokens.source.offsets)
    )
    return hashlib.sha256(" ".join((meta.dtype, *files)).encode()).hexdigest()
