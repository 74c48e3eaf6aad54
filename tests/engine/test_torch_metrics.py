"""States of torchmetrics, joined from several ranks, against one process that sees all samples.

Ranks are played by copies of the metrics; their number does not divide the samples, and one of four
has none.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
import yaml

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
pytestmark = pytest.mark.slow  # for the import of torchmetrics

from torchmetrics import MetricCollection, classification, regression, text, wrappers  # noqa: E402

from framework.config.load import config_from_values  # noqa: E402
from framework.engine.torch_metrics import MetricSums  # noqa: E402
from framework.errors import ConfigError  # noqa: E402
from framework.setup.evaluation_metrics import added_metrics  # noqa: E402
from tests.places import ROOT  # noqa: E402

NUM_SAMPLES = 47
BATCH = 5


def of_classes() -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, (NUM_SAMPLES,), generator=draw)
    logits = torch.randn(NUM_SAMPLES, 4, generator=draw)
    logits += 2 * torch.nn.functional.one_hot(targets, 4)
    return logits, targets


def of_yes_and_no() -> tuple[Any, Any]:
    logits, targets = of_classes()
    return logits[:, 0], (targets == 0).long()


def of_numbers() -> tuple[Any, Any]:
    logits, _ = of_classes()
    return logits[:, 0], logits[:, 0] + logits[:, 1]


def of_texts() -> tuple[Any, Any]:
    logits, targets = of_classes()
    words = ["one", "two", "three", "four", "five"]
    predicted = []
    truth = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        predicted.append(" ".join(words[int(abs(value) * 2) % 5] for value in row * 2))
        truth.append([f"{words[target]} two three four five one"])
    return predicted, truth


def one_truth() -> tuple[Any, Any]:
    predicted, truth = of_texts()
    return predicted, [row[0] for row in truth]


CASES: dict[str, tuple[Any, Any]] = {
    "auroc": (classification.MulticlassAUROC(4), of_classes),
    "ap": (classification.MulticlassAveragePrecision(4), of_classes),
    "f1": (classification.MulticlassF1Score(4, average="macro"), of_classes),
    "confusion": (classification.MulticlassConfusionMatrix(4), of_classes),
    "binary": (classification.BinaryAUROC(), of_yes_and_no),
    "binned": (classification.BinaryAUROC(thresholds=10), of_yes_and_no),
    "classes": (
        wrappers.ClasswiseWrapper(classification.MulticlassRecall(4, average=None)),
        of_classes,
    ),
    "several": (
        MetricCollection(
            [
                classification.MulticlassF1Score(4),
                classification.MulticlassPrecision(4),
                classification.MulticlassAUROC(4),
            ]
        ),
        of_classes,
    ),
    "pearson": (regression.PearsonCorrCoef(), of_numbers),
    "spearman": (regression.SpearmanCorrCoef(), of_numbers),
    "r2": (regression.R2Score(), of_numbers),
    "largest": (torchmetrics.MaxMetric(), of_numbers),
    "bleu": (text.BLEUScore(n_gram=2), of_texts),
    "sacre_bleu": (text.SacreBLEUScore(n_gram=2), of_texts),
    "rouge": (text.ROUGEScore(rouge_keys=("rouge1", "rougeL")), one_truth),
}


def sums_of(name: str, metric: Any) -> MetricSums:
    return MetricSums({name: metric}, torch.device("cpu"), most_bytes=1 << 30)


def update(sums: Any, predictions: Any, targets: Any, first: int, end: int) -> None:
    for start in range(first, end, BATCH):
        part = slice(start, min(start + BATCH, end))
        if isinstance(next(iter(sums._metrics.values())), torchmetrics.MaxMetric):
            sums._metrics["largest"].update(predictions[part])
        else:
            sums.update(predictions[part], targets[part])


def computed(sums: MetricSums) -> dict[str, Any]:
    ((_, compute),) = sums.computations()
    return dict(compute())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_joined_states_are_those_of_one_process(name: str, ranks: int) -> None:
    metric, make = CASES[name]
    predictions, targets = make()
    alone = sums_of(name, deepcopy(metric))
    update(alone, predictions, targets, 0, NUM_SAMPLES)
    expected = computed(alone)
    assert expected
    own = []
    for rank in range(ranks):
        # the first of four has no sample
        divided = ranks - (ranks == 4)
        place = rank - (ranks == 4)
        own.append(sums_of(name, deepcopy(metric)))
        if place >= 0:
            first = NUM_SAMPLES * place // divided
            end = NUM_SAMPLES * (place + 1) // divided
            update(own[-1], predictions, targets, first, end)
    for _ in range(2):  # a second pass begins anew
        used = [sums for sums in own if any(one.update_count for one in sums._all())]
        own[0].join([sums.packed() for sums in used])
        found = computed(own[0])
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.allclose(found[key], value, atol=1e-6, equal_nan=True), key
        if ranks > 1:
            break
        own = [sums_of(name, own[0]._metrics[name])]
        update(own[0], predictions, targets, 0, NUM_SAMPLES)


def test_scikit_learn_has_the_same() -> None:
    from scipy.stats import pearsonr, spearmanr
    from sklearn import metrics

    logits, targets = of_classes()
    scores = logits.softmax(1)
    expected = {
        "auroc": metrics.roc_auc_score(targets, scores, multi_class="ovr"),
        "f1": metrics.f1_score(targets, logits.argmax(1), average="macro"),
        "pearson": pearsonr(*of_numbers()).statistic,
        "spearman": spearmanr(*of_numbers()).statistic,
    }
    for name, value in expected.items():
        metric, make = CASES[name]
        sums = sums_of(name, deepcopy(metric))
        update(sums, *make(), 0, NUM_SAMPLES)
        assert computed(sums)[name].item() == pytest.approx(float(value), abs=1e-6)


def test_boxes_are_joined() -> None:
    pytest.importorskip("pycocotools", reason="pycocotools is not installed")
    from torchmetrics.detection import MeanAveragePrecision

    draw = torch.Generator().manual_seed(0)
    predictions = []
    truth = []
    for _ in range(NUM_SAMPLES):
        corners = torch.rand(3, 2, generator=draw) * 50
        boxes = torch.cat([corners, corners + 10 + torch.rand(3, 2, generator=draw) * 20], 1)
        labels = torch.randint(0, 2, (3,), generator=draw)
        truth.append({"boxes": boxes, "labels": labels})
        moved = boxes + torch.rand(3, 4, generator=draw) * 4
        scores = torch.rand(3, generator=draw)
        predictions.append({"boxes": moved, "labels": labels, "scores": scores})
    alone = sums_of("map", MeanAveragePrecision())
    update(alone, predictions, truth, 0, NUM_SAMPLES)
    own = [sums_of("map", MeanAveragePrecision()) for _ in range(3)]
    for rank, sums in enumerate(own):
        first = NUM_SAMPLES * rank // 3
        update(sums, predictions, truth, first, NUM_SAMPLES * (rank + 1) // 3)
    own[0].join([sums.packed() for sums in own])
    expected: Mapping[str, Any] = computed(alone)
    found = computed(own[0])
    assert expected["map_50"] > 0.1
    for key, value in expected.items():
        assert torch.allclose(found[key].double(), value.double()), key


def test_what_is_no_metric_is_refused() -> None:
    values = {"evaluation": {"metrics": {"f1": {"target": "collections:OrderedDict"}}}}
    with pytest.raises(ConfigError, match=r"evaluation\.metrics\.f1\.target = coll.*\[metric-targ"):
        added_metrics(config_from_values(values), None)
    with pytest.raises(ConfigError, match=r"metrics = f1: a builtins\.function is no|is no torchm"):
        added_metrics(config_from_values({}), {"f1": lambda outputs, targets: 0.0})
    given = added_metrics(config_from_values({}), classification.BinaryF1Score())
    assert list(given) == ["BinaryF1Score"]


def test_every_metric_of_the_page_can_be_built() -> None:
    page = (ROOT / "docs/custom-metrics.md").read_text(encoding="utf-8")
    built = set[str]()
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        metrics = (yaml.safe_load(block).get("evaluation") or {}).get("metrics") or {}
        if "detection" not in metrics or importlib.util.find_spec("pycocotools"):
            built |= added_metrics(
                config_from_values({"evaluation": {"metrics": metrics}}), None
            ).keys()
    assert {"auroc", "f1", "confusion", "pearson", "spearman", "bleu"} <= built
