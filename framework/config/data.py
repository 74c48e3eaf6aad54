"""`data`: what is trained on. Each kind builds a training and an evaluation dataset: bases of the
kinds that `framework/registry.py` has, in `framework/recipes/` and in installed packages, and those
that hold other data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from framework.config.base import (
    Count,
    Kind,
    Object,
    OneOf,
    Positive,
    PositiveCount,
    Section,
    Target,
)
from framework.config.paths import OptionalPath, PathText

# Byte-level text has 256 bytes and five special tokens.
BYTE_VOCAB_SIZE: Final = 261


@dataclass(frozen=True)
class ImageShape:
    """Shape of a batch of images: (batch, channels, size, size), labels in [0, num_classes).

    `num_classes` is None where only the files know.
    """

    channels: int
    size: int
    num_classes: int | None


class Loader(Section):
    """Options for fetching batches; the same for every dataset."""

    shuffle: bool = True
    """Draw a new order of the training samples every epoch, from (run.seed, epoch)."""
    num_workers: Count = 0
    """Processes per rank that fetch batches ahead; 0 fetches in the training process."""
    prefetch_batches: PositiveCount = 2
    """Micro-batches that each worker keeps ready; only with num_workers > 0."""
    bucket_steps: Count = 0
    """Sort so many steps' samples by length, so that a step's are alike; the steps are then drawn
    in another order. 0: not. The dataset needs `lengths`, a number per sample, or a column
    ``length``.
    """
    curriculum_steps: Count = 0
    """Steps that begin with the shortest samples and draw from ever longer ones; epochs begin after
    them. Needs lengths as `bucket_steps` does.
    """

    def num_train_samples(self) -> int | None:
        """Return the number of training samples as published or declared; None if it is unknown
        before the files are read or the code runs.
        """
        return getattr(self, "train_samples", None)

    def image_shape(self) -> ImageShape | None:
        """Return the shape of the images; None if there are none, or if it is unknown before the
        files are read or the code runs.
        """
        return None

    def has_random_samples(self) -> bool:
        """Check whether reading the same sample twice may give different tensors (augmentation)."""
        return bool(getattr(self, "random_samples", False) or getattr(self, "augment", False))


class _Streamable(Section):
    """Data that may be a stream: samples one after the other, without a number."""

    lanes: PositiveCount | None = None
    """Parts that a stream is read in at once; left out: as many as it has, up to 64, and as divide
    the global batch. Ranks and workers divide them.
    """
    train_samples: PositiveCount | None = None
    """Training samples, so that `plan` can count steps before the data is read. Of a stream: how
    many make an epoch; left out, the run is one, and needs `training.max_steps`.
    """


class Dataset(Kind, Loader):
    """Base of all data that is known by name."""

    registered_in: ClassVar[str] = "dsf.data"
    # Function that looks at the files without torch (`framework.plan.data_files`); empty: they are
    # read when the run starts.
    looks_at_files: ClassVar[str] = ""
    own_fields: ClassVar[frozenset[str]] = frozenset(
        {"kind", *Loader.model_fields, *_Streamable.model_fields}
    )


class DataKind(Dataset):
    """Base of data that may be a part of a mixture."""


class HuggingFace(DataKind, _Streamable):
    """Rows in files, as tensors, by Hugging Face's ``datasets``; tar files are WebDataset's
    shards.
    """

    builds: ClassVar[str] = "framework.data.hugging_face:build"
    kind: Literal["huggingface"] = "huggingface"
    path: PathText
    """Folder of ``save_to_disk``, or a pattern of ``.json``, ``.jsonl``, ``.csv``, ``.txt``,
    ``.parquet`` or ``.tar`` files: ``data/*.parquet``, ``data/{000..009}.tar``.
    """
    eval_path: OptionalPath = None
    """As `path`, for evaluation; left out: the split ``validation`` or ``test`` of a folder that
    has it.
    """
    columns: list[str] | dict[str, str] | None = None
    """A list: samples are tuples of these columns, (inputs, ..., target). A mapping: dicts, column
    -> name in batches. Left out: dicts of all.
    """
    streaming: bool = False
    """Read rows as they come instead of by number; the files are its parts."""


class DataTarget(Target, Loader, _Streamable):
    """The user's own data: a callable that returns a training dataset, or a pair (training,
    evaluation), whose second may be several datasets by name.
    """

    random_samples: bool = True
    """Seed torch's, numpy's and Python's generators for every sample from (run.seed, epoch, sample
    index), so that random augmentation resumes exactly; costs about 20 microseconds a sample. False
    for datasets without randomness.
    """


class DataObject(Object, Loader, _Streamable):
    """Datasets that were handed over from Python."""

    random_samples: bool = True
    """As for a target."""


class Part(Section):
    """A part of a mixture."""

    weight: Positive
    """Share of the samples, beside the other parts' weights."""
    data: Annotated[DataKind | DataTarget, OneOf()]
    """What is read, as in the section `data`; its keys of a loader mean nothing here."""


class Mixture(Dataset, _Streamable):
    """Several data in fixed shares, each begun anew where it ends. A stream; evaluated is what the
    first part has.
    """

    streaming: ClassVar[bool] = True
    kind: Literal["mixture"] = "mixture"
    parts: Annotated[list[Part], Field(min_length=2)]
    """Weight and data of each; a share is kept to within one sample per lane."""

    def has_random_samples(self) -> bool:
        """Check whether some part has random samples."""
        return any(part.data.has_random_samples() for part in self.parts)


DataSection = Annotated[Dataset | DataTarget | DataObject, OneOf()]
