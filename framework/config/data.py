"""`data`: what is trained on. Each kind builds a training and an evaluation dataset
(`framework/data/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from framework.config.base import (
    Count,
    CountFromEight,
    Kind,
    Object,
    OneOf,
    Positive,
    PositiveCount,
    Section,
    Target,
)

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
    own_fields: ClassVar[frozenset[str]] = frozenset(
        {"kind", *Loader.model_fields, *_Streamable.model_fields}
    )


class DataKind(Dataset):
    """Base of data that may be a part of a mixture."""


class Digits(DataKind):
    """scikit-learn's bundled handwritten digits: 1,797 real grey images of 8x8 pixels, no
    download.
    """

    builds: ClassVar[str] = "framework.data.digits:build"
    kind: Literal["digits"] = "digits"
    image_size: Literal[8, 28, 32] = 28
    """Height and width in pixels that the 8x8 originals are enlarged to."""

    def num_train_samples(self) -> int:
        return 1437

    def image_shape(self) -> ImageShape:
        return ImageShape(channels=1, size=self.image_size, num_classes=10)


class FashionMNIST(DataKind):
    """Fashion-MNIST (Xiao et al. 2017): 60,000 + 10,000 grey images of 28x28 pixels, through
    torchvision.
    """

    builds: ClassVar[str] = "framework.data.torchvision_sets:fashion_mnist"
    kind: Literal["fashion_mnist"] = "fashion_mnist"
    root: str = "data"
    """Folder that holds (or will hold) torchvision's ``FashionMNIST/raw``."""
    download: bool = False
    """Fetch the files when they are not there."""
    augment: bool = False
    """Random crops (padding 4) and horizontal flips while training."""

    def num_train_samples(self) -> int:
        return 60_000

    def image_shape(self) -> ImageShape:
        return ImageShape(channels=1, size=28, num_classes=10)


class CIFAR10(DataKind):
    """CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32x32 pixels, through
    torchvision.
    """

    builds: ClassVar[str] = "framework.data.torchvision_sets:cifar10"
    kind: Literal["cifar10"] = "cifar10"
    root: str = "data"
    """Folder that holds (or will hold) torchvision's ``cifar-10-batches-py``."""
    download: bool = False
    """Fetch the files when they are not there."""
    augment: bool = True
    """Random crops (padding 4) and horizontal flips while training."""

    def num_train_samples(self) -> int:
        return 50_000

    def image_shape(self) -> ImageShape:
        return ImageShape(channels=3, size=32, num_classes=10)


class ImageFolder(DataKind):
    """Images in folders named after their class: ``<root>/train/<class>/*`` and
    ``<root>/val/<class>/*``.
    """

    builds: ClassVar[str] = "framework.data.image_sets:build"
    kind: Literal["image_folder"] = "image_folder"
    root: str
    """Folder with the sub-folders named by `train_dir` and `eval_dir`."""
    train_dir: str = "train"
    """Sub-folder of the training images."""
    eval_dir: str = "val"
    """Sub-folder of the evaluation images."""
    image_size: PositiveCount = 224
    """Height and width in pixels after cropping."""
    augment: bool = True
    """Random resized crops and horizontal flips while training; otherwise resize and centre
    crop.
    """

    def image_shape(self) -> ImageShape:
        return ImageShape(channels=3, size=self.image_size, num_classes=None)


class SyntheticImages(DataKind):
    """Random images with random labels, the same on every machine: for measuring speed, not for
    learning.
    """

    builds: ClassVar[str] = "framework.data.synthetic:build"
    kind: Literal["synthetic_images"] = "synthetic_images"
    num_samples: PositiveCount = 10_000
    """Training samples."""
    num_eval_samples: PositiveCount = 1_000
    """Evaluation samples."""
    image_size: PositiveCount = 224
    """Height and width in pixels."""
    channels: PositiveCount = 3
    """Channels of an image."""
    num_classes: PositiveCount = 1000
    """Labels are drawn from [0, num_classes)."""

    def num_train_samples(self) -> int:
        return self.num_samples

    def image_shape(self) -> ImageShape:
        return ImageShape(
            channels=self.channels, size=self.image_size, num_classes=self.num_classes
        )


class _Text(DataKind):
    """Text as numbered tokens, from a folder that ``prepare`` made."""

    path: str | None = None
    """Folder made by ``python -m framework prepare``; left out: the sources of Python's own
    standard library, byte by byte (vocabulary 261), some megabytes that need no download and differ
    between Python versions.
    """

    def vocab_size(self) -> int | None:
        """Return the number of different tokens; None if only the files have it."""
        return BYTE_VOCAB_SIZE if self.path is None else None


class Text(_Text):
    """Windows of text for a causal language model (GPT): documents packed back to back, split by an
    end token.
    """

    builds: ClassVar[str] = "framework.data.text_windows:build"
    kind: Literal["text"] = "text"
    sequence_length: PositiveCount = 256
    """Tokens per sample."""


class TextPairs(_Text):
    """Pairs of segments for BERT: [CLS] A [SEP] B [SEP], where B follows A in half of them, with
    hidden tokens to guess.
    """

    builds: ClassVar[str] = "framework.data.text_pairs:build"
    kind: Literal["text_pairs"] = "text_pairs"
    sequence_length: CountFromEight = 128
    """Tokens per sample, the three special ones included."""
    mask_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.15
    """Share of the tokens to be guessed; of these 80 % become [MASK], 10 % another token, 10 % stay
    (Devlin et al. 2018).
    """

    def has_random_samples(self) -> bool:
        """Return True: segments and hidden tokens are drawn anew every epoch."""
        return True


class _Labelled(Dataset):
    """Text by the line, that becomes tokens when the run starts."""

    path: str | None = None
    eval_path: str | None = None
    """File of the evaluation; left out: every so many of `path`."""
    eval_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of `path` that is for evaluation, where there is no `eval_path`."""
    tokenizer: str | None = None
    """Folder of a tokenizer of transformers, or that `prepare` made; left out: bytes (vocabulary
    261).
    """
    sequence_length: PositiveCount = 512
    """Most tokens of a sample."""

    def vocab_size(self) -> int | None:
        """Return the number of different tokens; None if only the files have it."""
        return BYTE_VOCAB_SIZE if self.tokenizer is None else None


class Conversations(_Labelled):
    """Conversations, of which a causal language model learns the assistant's answers: supervised
    fine-tuning.
    """

    builds: ClassVar[str] = "framework.data.conversations:build"
    kind: Literal["conversations"] = "conversations"
    path: str | None = None
    """JSON lines of ``messages`` ({role, content}), of ``prompt`` and ``completion``, or of
    ShareGPT's ``conversations``; left out: questions that the documentation of Python's own library
    answers.
    """
    chat_template: str | None = None
    """Jinja, or a file of it; left out: the tokenizer's own. What is learnt stands between ``{%
    generation %}`` and ``{% endgeneration %}``; without them it is found by rendering conversations
    up to each answer.
    """
    packing: bool = False
    """Several conversations in a row of `sequence_length`, none of which sees another."""
    too_long: Literal["cut", "drop"] = "cut"
    """What becomes of longer conversations: their end is cut off, or they are left out."""


class LabelledText(_Labelled):
    """Texts and their classes, for a model that reads (tokens, segments, mask) or transformers'
    ``input_ids``.
    """

    builds: ClassVar[str] = "framework.data.labelled_text:build"
    kind: Literal["labelled_text"] = "labelled_text"
    path: str | None = None
    """Rows of ``.jsonl`` or ``.csv``; left out: sentences of the documentation of Python's own
    library, of which the module is to be guessed (8 classes).
    """
    text: str = "text"
    """Column of the text."""
    label: str = "label"
    """Column of the class: its number from 0, or its name, which are numbered in alphabetical
    order.
    """


class HuggingFace(DataKind, _Streamable):
    """Rows in files, as tensors, by Hugging Face's ``datasets``; tar files are WebDataset's
    shards.
    """

    builds: ClassVar[str] = "framework.data.hugging_face:build"
    kind: Literal["huggingface"] = "huggingface"
    path: str
    """Folder of ``save_to_disk``, or a pattern of ``.json``, ``.jsonl``, ``.csv``, ``.txt``,
    ``.parquet`` or ``.tar`` files: ``data/*.parquet``, ``data/{000..009}.tar``.
    """
    eval_path: str | None = None
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
