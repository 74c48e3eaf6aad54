"""Datasets of a run, made by a dataset builder or passed by a program: a training set, and one
evaluation set, or several by name, or none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from framework.data.loaders import is_stream, num_samples_of
from framework.errors import ConfigError, Problem


@dataclass(frozen=True)
class Splits:
    """A training dataset, and one for evaluation, or several by name: samples by number, or
    streams.

    Attributes:
        train: for training.
        evaluation: for evaluation: a dataset, a mapping of datasets by name, or None.
        taken: settings of the `DataLoader`s that were passed in place of datasets: ``num_workers``,
            ``micro_size`` (``eval_size`` for evaluation) and ``shuffle``.
    """

    train: Any
    evaluation: Any
    taken: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_train(self) -> int | None:
        """Number of training samples; None for a stream."""
        return num_samples_of(self.train)

    @property
    def evaluations(self) -> dict[str, Any]:
        """Evaluation datasets by name; a single one has an empty name."""
        if isinstance(self.evaluation, Mapping):
            return dict(self.evaluation)
        if self.evaluation is None:
            return {}
        return {"": self.evaluation}

    def by_name(self) -> dict[str, Any]:
        """Return all datasets: ``training``, ``evaluation`` or ``evaluation noisy`` -> dataset."""
        datasets = {"training": self.train}
        for name, dataset in self.evaluations.items():
            datasets[f"evaluation {name}".rstrip()] = dataset
        return datasets


def as_splits(result: object) -> Splits:
    """Check the result of a user's `data.target`: a dataset, a tuple (training, evaluation or
    None), or a `Splits`; for evaluation there may be several datasets by name.

    Raises:
        ConfigError: kind ``data-target-result``, with every reason why the result cannot be trained
            on.
    """
    return _check(*_pair(result, _RETURNED), _RETURNED)


def given_splits(train_data: object, eval_data: object = None) -> Splits:
    """Check the arguments of `fit`: a dataset each, or the pair of both (or a `Splits`) as
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
    if evaluation is None:
        evaluation = eval_data
    return _check(train, evaluation, _GIVEN)


@dataclass(frozen=True)
class _Origin:
    """Origin of datasets: the keys that messages name, and their verb for it."""

    train_key: str
    eval_key: str
    give: str
    given: str


_RETURNED: Final = _Origin("data.target", "data.target", "return", "returned")
_GIVEN: Final = _Origin("train_data", "eval_data", "hand over", "handed over")


def _pair(result: object, origin: _Origin) -> tuple[Any, Any]:
    if isinstance(result, Splits):
        return result.train, result.evaluation
    if not isinstance(result, tuple):
        return result, None
    if len(result) == 2:
        return result
    reason = f"a tuple of {len(result)} was {origin.given}"
    fix = f"{origin.give} (training, evaluation)"
    raise ConfigError.of("data-target-result", reason, fix, origin.train_key)


def _check(train: Any, evaluation: Any, origin: _Origin) -> Splits:
    """Check datasets, taken out of their `DataLoader`s, and return them with the loaders' settings.

    Raises:
        ConfigError: all problems at once; or kind ``loader-not-taken``.
    """
    train, taken = _taken_over(train, key=origin.train_key, trains=True)
    problems = [_problem_of(train, origin, name="training")]
    is_by_name = isinstance(evaluation, Mapping)
    if isinstance(evaluation, Mapping) and not evaluation:
        fix = f"{origin.give} None in its place to train without evaluation"
        problems.append(
            Problem("data-target-result", "there is no evaluation set in it", fix, origin.eval_key)
        )
    evaluations = {}
    for name, given in Splits(train, evaluation).evaluations.items():
        if is_by_name and not (isinstance(name, str) and _NAME.fullmatch(name)):
            reason = "this is no name of an evaluation set, as its metrics are eval/<name>/<metric>"
            fix = f"{origin.give} names of letters, digits, '_', '-' and '.'"
            problems.append(Problem("data-target-result", reason, fix, origin.eval_key, name))
        dataset, eval_taken = _taken_over(given, key=origin.eval_key, trains=False)
        evaluations[name] = dataset
        if eval_taken:
            taken["eval_size"] = eval_taken["micro_size"]
        problems.append(_problem_of(dataset, origin, name=f"evaluation {name}".rstrip()))
    if any(problems):
        raise ConfigError(filter(None, problems))
    if is_by_name:
        return Splits(train, evaluations, taken)
    return Splits(train, evaluations.get(""), taken)


def _taken_over(given: Any, *, key: str, trains: bool) -> tuple[Any, dict[str, Any]]:
    """Return a dataset and its settings, as `from_dataloader.taken_over` does."""
    is_hugging_face = type(given).__module__.startswith("datasets.")
    if not isinstance(given, DataLoader) and not is_hugging_face:
        return given, {}
    from framework.data.from_dataloader import taken_over

    return taken_over(given, key=key, trains=trains)


_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)


def _problem_of(dataset: object, origin: _Origin, *, name: str) -> Problem | None:
    """Return why the dataset `name` (as in `Splits.by_name`) cannot be read, or None if it can."""
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    usual_fix = (
        f"{origin.give} a map-style dataset with __len__ and __getitem__, a stream with "
        "__iter__, or a tuple of two"
    )

    def problem(reason: str, fix: str = usual_fix) -> Problem:
        key = origin.train_key if name == "training" else origin.eval_key
        return Problem("data-target-result", f"the {name} set {reason}", fix, key)

    if hasattr(dataset, "__next__"):
        fix = (
            f"{origin.give} an object whose __iter__ begins anew, such as a class with `def "
            "__iter__(self): yield ...`"
        )
        return problem(
            f"is an iterator ({kind}), which can be read once: no second pass, and no resume", fix
        )
    if is_stream(dataset):
        if getattr(dataset, "_distributed", None) is None:
            return None
        reason = f"({kind}) was divided over ranks (split_dataset_by_node), which the loader does"
        return problem(reason, f"{origin.give} the whole stream")
    if dataset is None:
        shown = "None"
    else:
        shown = f"a {kind.removeprefix('builtins.')}"
    if isinstance(dataset, Tensor | np.ndarray):
        wrapped = "torch.utils.data.TensorDataset(inputs, targets)"
        return problem(
            f"is {shown}, not a dataset of samples (inputs, target)", f"{origin.give} {wrapped}"
        )
    if isinstance(dataset, list) and dataset and not isinstance(dataset[0], tuple | list | dict):
        # Mostly [inputs, targets], or inputs alone: as a dataset they would be two samples, or
        # samples without a target.
        fix = (
            f"{origin.give} a list of pairs (inputs, target), or "
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
    if name == "training":
        fix = f"{origin.give} at least one sample"
    else:
        fix = f"{origin.give} None in its place to train without evaluation"
    return problem(f"({kind}) is empty", fix)


def tokens_sha256(dataset: Any) -> str | None:
    """Hash the tokens behind a dataset, and the beginnings of their documents, with SHA-256; None
    for data without tokens.

    For tokens in files the hash is made from the checksums in ``meta.json``: the files are not
    read.

    Raises:
        ConfigError: ``meta.json`` is gone or damaged.
    """
    tokens = getattr(dataset, "tokens", None)
    if tokens is None:
        return None
    from framework.data.tokens import Tokens, sha256_of

    if not isinstance(tokens, Tokens):
        return None
    return sha256_of(tokens)
