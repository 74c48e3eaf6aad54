"""`task`: what a batch means, that is its loss and its metrics (`framework/tasks/`)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from framework.config.base import Kind, Object, Target, kind_of


class Classification(Kind):
    """Cross-entropy over classes; metric: accuracy."""

    builds: ClassVar[str] = "framework.tasks.classification:Classification"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    kind: Literal["classification"] = "classification"
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the target spread evenly over all classes, in training only (Szegedy et al. 2016)."""


class CausalLM(Kind):
    """Cross-entropy of the next token at every position; metrics: accuracy, perplexity."""

    builds: ClassVar[str] = "framework.tasks.causal_lm:CausalLM"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "perplexity")
    kind: Literal["causal_lm"] = "causal_lm"


class MaskedLM(Kind):
    """BERT's pre-training: hidden tokens plus next-sentence prediction; metrics: accuracy, perplexity, one for each
    part.
    """

    builds: ClassVar[str] = "framework.tasks.masked_lm:MaskedLM"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "mlm_loss", "accuracy", "nsp_loss", "nsp_accuracy", "perplexity")
    kind: Literal["masked_lm"] = "masked_lm"


TaskSection = Annotated[
    Annotated[Classification, Tag("classification")]
    | Annotated[CausalLM, Tag("causal_lm")]
    | Annotated[MaskedLM, Tag("masked_lm")]
    | Annotated[Target, Tag("target")]
    | Annotated[Object, Tag("object")],
    Discriminator(kind_of),
]
