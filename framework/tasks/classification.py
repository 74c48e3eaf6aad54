"""One class per sample: cross-entropy and accuracy."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from framework.tasks.task import Ratio, Task


class Classification(Task):
    """Cross-entropy over classes; metrics: loss and accuracy.

    The model returns logits (batch, num_classes) of any floating dtype; targets are class numbers (batch,) int64. With
    further dimensions behind ((batch, num_classes, H, W) and (batch, H, W)) every position counts as a sample.
    """

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        """Set the share of the target spread evenly over all classes, in [0, 1) (Szegedy et al. 2016, section 7).

        It applies to training only: the measured loss is the plain cross-entropy, comparable between runs.
        """
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats with label smoothing, 0-d float32."""
        return cross_entropy(outputs.float(), targets, label_smoothing=self.label_smoothing)

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Ratio]:
        """``loss``: cross-entropy in nats, not smoothed; ``accuracy``: share of samples whose largest logit is
        right.
        """
        nats = cross_entropy(outputs.float(), targets, reduction="none").detach().double().sum()
        correct = (outputs.argmax(dim=1) == targets).double().sum()
        num_samples = targets.numel()
        return {"loss": Ratio(nats, num_samples), "accuracy": Ratio(correct, num_samples)}
