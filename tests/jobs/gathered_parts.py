"""Tasks with metrics over all samples, and what they are compared with."""

from __future__ import annotations

from typing import Any, Final

import torch

from framework.tasks.causal_lm import CausalLM
from framework.tasks.classification import Classification
from framework.tasks.model_loss import ModelLoss
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


PROMPT: Final = 6
ANSWER: Final = 8


def llama_of_words() -> Any:
    """Build a small model of transformers over a vocabulary of 20 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=19))


def prompts() -> Any:
    """Make prompts with answers: tokens that count up, each by its own step; 11 for evaluation."""
    rows = []
    for number in range(75):
        tokens = torch.arange(PROMPT + ANSWER) * (1 + number % 3) + number
        tokens = tokens % 18 + 1
        rows.append({"input_ids": tokens, "labels": tokens})
    return rows[:64], rows[64:]


def generated(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Go on with prompts (samples, positions) by as many tokens for every sample."""
    prompt = tokens[:, :PROMPT]
    length = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER}
    mask = torch.ones_like(prompt)
    answers = model.generate(prompt, attention_mask=mask, do_sample=False, **length)
    return answers[:, PROMPT:]


def words_of(tokens: torch.Tensor) -> list[str]:
    return [" ".join(f"w{token}" for token in row) for row in tokens.tolist()]


class Answers(ModelLoss):
    """The model's loss, and in evaluation the text that it generates."""

    def __init__(self) -> None:
        super().__init__(mean_over="next_labels")

    def forward(self, model: Any, inputs: Any) -> Any:
        outputs = super().forward(model, inputs)
        module = getattr(model, "module", model)  # within DeepSpeed's engine, or alone in predict
        if not module.training:
            outputs.answers = generated(module, inputs["input_ids"])
        return outputs

    def predicted(self, outputs: Any, targets: Any) -> Any:
        return words_of(outputs.answers), [[row] for row in words_of(targets[:, PROMPT:])]
