"""Tasks with metrics over all samples, and what they are compared with."""

from __future__ import annotations

from typing import Any, Final

import torch

from framework.tasks.causal_lm import CausalLM
from framework.tasks.classification import Classification
from tests.jobs.parts import build

NUM_SAMPLES: Final = 101  # neither 2 nor 3 ranks have equally many


def digits() -> Any:
    """Digits, with an evaluation set of `NUM_SAMPLES`, and one of fewer samples than ranks."""
    splits = build(28)
    rest = torch.utils.data.Subset(splits.evaluation, range(NUM_SAMPLES))  # type: ignore[arg-type]
    return splits.train, {"all": rest, "few": torch.utils.data.Subset(rest, [5, 6])}


def scores(everything: Any) -> dict[str, Any]:
    """Compute metrics of digits as scikit-learn has them."""
    from sklearn.metrics import average_precision_score, confusion_matrix, f1_score, roc_auc_score

    probabilities = everything["probabilities"].numpy()
    truth = everything["truth"].numpy()
    guesses = probabilities.argmax(1)
    return {
        "auroc": roc_auc_score(truth, probabilities, multi_class="ovr", average="macro"),
        "f1": f1_score(truth, guesses, average="macro"),
        "precision_of_3": average_precision_score(truth == 3, probabilities[:, 3]),
        "confusion": confusion_matrix(truth, guesses, labels=range(10)),
    }


class Scores(Classification):
    """Classification with metrics of scikit-learn."""

    def collect(self, outputs: Any, targets: Any) -> dict[str, Any]:
        words = [f"digit {int(target)}" for target in targets]
        probabilities = outputs.float().softmax(1)
        return {"probabilities": probabilities, "truth": targets, "words": words}

    def finish(self, everything: Any) -> dict[str, Any]:
        truth = everything["truth"]
        assert everything["words"] == [f"digit {int(target)}" for target in truth]
        place = torch.arange(1, len(truth) + 1, dtype=torch.float64)
        # of the order of the samples
        order = float((place * truth).sum())
        found = {"order": order, "samples": len(truth)}
        if len(truth) > 2:
            found |= scores(everything)
        return found


class Tokens(CausalLM):
    """Next tokens, with a checksum of their order, and texts of unlike length."""

    def collect(self, outputs: Any, targets: Any) -> dict[str, Any]:
        guesses = getattr(outputs, "logits", outputs).argmax(-1)
        return {"guesses": guesses, "targets": targets, "rows": list(targets)}

    def finish(self, everything: Any) -> dict[str, Any]:
        targets = everything["targets"]
        assert torch.equal(torch.stack(everything["rows"]), targets)
        counts = targets != self.ignore_index
        right = (everything["guesses"] == targets) & counts
        place = torch.arange(1, targets.numel() + 1, dtype=torch.float64).view_as(targets)
        return {
            "share_right": float(right.sum() / counts.sum()),
            "order": float((place * targets * counts).sum()),
            "width": targets.shape[1],
        }


class FailsInFinish(Scores):
    def finish(self, everything: Any) -> dict[str, Any]:
        return everything["probability"]


class UnlikeRows(Classification):
    """Rows of another shape on each rank."""

    def collect(self, outputs: Any, targets: Any) -> dict[str, Any]:
        width = 1 + torch.distributed.get_rank()
        return {"rows": torch.zeros(len(targets), width)}


class Large(Scores):
    """Scores, on a host with little memory."""

    def __init__(self) -> None:
        from framework.engine import evaluation

        super().__init__()
        evaluation.host_limit = lambda: 4000


class NoMatrix(Scores):
    def finish(self, everything: Any) -> dict[str, Any]:
        return {"best": "digit 3"}


def texts() -> Any:
    """Rows of 22 tokens and their next ones, some left out; seven of them for evaluation."""
    tokens = torch.randint(0, 262, (31, 23), generator=torch.Generator().manual_seed(3))
    targets = torch.where(tokens[:, 1:] % 5 > 0, tokens[:, 1:], -100)
    pairs = list(zip(tokens[:, :-1], targets, strict=True))
    return pairs[:24], pairs[24:]
