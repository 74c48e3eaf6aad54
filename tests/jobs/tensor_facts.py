"""What two ranks of a tensor group do inside, compared here: tensor_facts.py OUT.json, which holds
what was found.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from framework.config.training import TensorSplit
from framework.engine import tensor_cut
from framework.engine.distributed import gather, process_group
from framework.engine.tensor_cut import TensorCut
from framework.engine.tensor_plans import known_plan
from framework.errors import ConfigError
from framework.models import sequence
from framework.models.layer_lists import as_layers
from framework.models.layers import Layer, LayeredModel
from framework.models.split import TensorPart, VocabularyPart
from framework.recipes.language_models import bert, gpt
from framework.tasks.causal_lm import CausalLM
from framework.tasks.masked_lm import MaskedLM
from framework.tasks.task import Ratio, Task
from tests.jobs import tensor_parts

_SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "max_positions": 8,
    "hidden_size": 16,
    "num_heads": 4,
    "mlp_size": 24,
}
_TOKENS = torch.arange(16).view(2, 8)


class Mean(Task):
    """A loss that reads all logits."""

    def loss(self, outputs: Any, targets: Any) -> Tensor | Ratio | tuple[Ratio, ...]:
        mean: Tensor = outputs.mean()
        return mean


def make_gpt(num_layers: int = 1, dropout: float = 0.0, **shape: Any) -> gpt.GPT:
    torch.manual_seed(3)
    return gpt.GPT.of(
        **(_SIZES | {"num_layers": num_layers, "num_kv_heads": 4, "dropout": dropout} | shape)
    )


def make_bert(num_layers: int = 1) -> bert.BERT:
    torch.manual_seed(3)
    return bert.BERT.of(**_SIZES, num_layers=num_layers, dropout=0.0)


def cut(model: nn.Module, task: Task, plan: dict[str, str] | None = None) -> nn.Module:
    given = None if plan is None else {name: TensorSplit(split=word) for name, word in plan.items()}  # type: ignore[arg-type]
    return TensorCut(None, given, task)(model)


def count_sums(run: Callable[[], Any]) -> list[int]:
    """Elements of each all-reduce within a call."""
    all_reduce, sizes = torch.distributed.all_reduce, list[int]()

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        assert tensor.is_contiguous()
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    torch.distributed.all_reduce = counted
    try:
        run()
    finally:
        torch.distributed.all_reduce = all_reduce
    return sizes


def per_block(
    make: Callable[[int], nn.Module], task: Task, inputs: tuple[Tensor, ...]
) -> list[list[int]]:
    """Elements of each all-reduce of a block in the forward and in the backward pass: half of what
    three blocks have more than one.
    """
    found = []
    for num_layers in (1, 3):
        model, outputs = cut(make(num_layers), task), list[Any]()

        def forward(model: nn.Module = model, outputs: list[Any] = outputs) -> None:
            outputs.append(model(*inputs))

        def backward(outputs: list[Any] = outputs) -> None:
            tensors = outputs[0] if isinstance(outputs[0], tuple) else outputs
            sum(tensor.float().square().sum() for tensor in tensors).backward()

        found.append([count_sums(forward), count_sums(backward)])
    blocks = [Counter(many) - Counter(one) for one, many in zip(*found, strict=True)]
    return [
        sorted(size for size, count in block.items() for _ in range(count // 2)) for block in blocks
    ]


def weights_joined() -> bool:
    """Parts joined are the weights of one process, to the bit; every rank's logits are a part of
    one process's.
    """
    whole, task = make_gpt(), CausalLM()
    model = cut(make_gpt(), task)
    logits = torch.cat(gather(model(_TOKENS).detach()), dim=-1)
    parts = [gather(weight.detach()) for weight in model.parameters()]
    splits = [vars(weight).get("split") for weight in model.parameters()]
    joined = [
        some[0] if split is None else split.whole(some)
        for some, split in zip(parts, splits, strict=True)
    ]
    # one embedding, 4 + 2 matrices, 3 + 1 biases of columns
    assert sum(split is not None for split in splits) == 11
    assert torch.allclose(logits, whole(_TOKENS), atol=1e-6)
    assert task.vocabulary is not None
    assert task.vocabulary.widths == [18, 19]
    return all(
        torch.equal(one, other) for one, other in zip(joined, whole.parameters(), strict=True)
    )


def logits_whole() -> bool:
    """A task that reads all logits gets all of them, and gradients are those of one process."""
    whole, model = make_gpt(), cut(make_gpt(), Mean())
    for one in (whole, model):
        one(_TOKENS).square().mean().backward()
    same = torch.allclose(whole(_TOKENS), model(_TOKENS), atol=1e-6)
    of_norms = [dict(one.named_parameters())["norm.weight"].grad for one in (whole, model)]
    return same and torch.allclose(*of_norms, atol=1e-7)  # type: ignore[arg-type]


def known_families() -> dict[str, bool]:
    """A task that reads all logits gets all of them from models whose plan is known here, and with
    keys and values kept from one token to the next.
    """
    found = {}
    for family in ("gpt2", "bert"):
        pair: list[Any] = []
        for _ in range(2):
            torch.manual_seed(3)
            pair.append(tensor_parts.without_plan(family).eval())
        whole, model = pair
        cut(model, Mean())
        with torch.no_grad():
            found[family] = torch.allclose(whole(_TOKENS).logits, model(_TOKENS).logits, atol=1e-5)
        if family == "gpt2":
            texts = [
                one.generate(_TOKENS, max_new_tokens=6, do_sample=False, use_cache=True)
                for one in pair
            ]
            found["generated"] = torch.equal(*texts)
    return found


def vocabulary_loss() -> dict[str, bool]:
    """Losses, gradients and guesses of divided logits against torch's, with ties and ignored
    targets.
    """
    torch.manual_seed(11)
    whole = torch.randn(12, 37).mul(30).round().div(4).requires_grad_()  # some are equal
    whole.data[3, 5:35:3] = 99.0  # the largest, on both ranks
    targets = torch.randint(37, (12,))
    targets[[2, 9]] = -100
    part = VocabularyPart(TensorPart(None), [18, 19], joins=False)
    own = whole.detach()[:, part.first : part.first + part.size].clone().requires_grad_()
    expected = cross_entropy(whole, targets, ignore_index=-100, reduction="none")
    found = part.nats(own, targets, ignore_index=-100)
    for nats in (expected, found):
        nats.square().sum().backward()
    assert whole.grad is not None
    assert own.grad is not None
    gradient = torch.cat(gather(own.grad), dim=-1)
    return {
        "nats": torch.allclose(expected, found, atol=1e-5),
        "gradient": torch.allclose(gradient, whole.grad, atol=1e-5),
        "guesses": torch.equal(part.guesses(own.detach()), whole.argmax(-1)),
    }


def dropouts() -> dict[str, bool]:
    """Random numbers drawn in attention differ between ranks; those after it, and all of the next
    step, do not.
    """
    model, drawn = cut(make_gpt(dropout=0.5), CausalLM()), dict[str, list[Tensor]]()
    attend = sequence.scaled_dot_product_attention

    def noting(*args: Any, **options: Any) -> Tensor:
        drawn.setdefault("attention", []).append(torch.rand(4))
        return attend(*args, **options)

    sequence.scaled_dot_product_attention = noting  # type: ignore[assignment]
    block = model.get_submodule("blocks.0")
    block.register_forward_hook(lambda *_: drawn.setdefault("block", []).append(torch.rand(4)))
    hidden: list[Tensor] = []
    block.register_forward_hook(lambda module, inputs, output: hidden.append(output.detach()))
    torch.manual_seed(5)
    for every in (0, 1):
        model.recompute_every = every  # type: ignore[assignment]
        model(_TOKENS).sum().backward()
    model.eval()
    model(_TOKENS)
    equal = {
        name: [len(set(map(str, gather(one.tolist())))) == 1 for one in some]
        for name, some in drawn.items()
    }
    return {
        # the last is an evaluation
        "attention differs": equal["attention"] == [False, False, False, True],
        # computed anew in the backward pass
        "again": torch.equal(drawn["attention"][1], drawn["attention"][2]),
        "block is the same": all(equal["block"]),
        "hidden is the same": all(torch.equal(hidden[0], other) for other in gather(hidden[0])),
    }


def summed_weight() -> float:
    """Return by how much the gradient of a weight of the model itself, which the plan names as
    summed, differs from that of the whole model.
    """
    gradients = []
    for plan in (None, {"up": "column", "down": "row", "slope": "summed"}):
        torch.manual_seed(3)
        model: nn.Module = tensor_parts.Sloped()
        if plan is not None:
            model = cut(model, Mean(), plan)
        model(torch.linspace(-1, 1, 16).view(2, 8)).square().sum().backward()
        gradients.append(float(model.slope.grad))
    return abs(gradients[1] - gradients[0])


def own_head() -> nn.Module:
    """Return layers of which the last one computes with the weight of the first one itself."""
    words = partial(nn.Embedding, 8, 4)
    head = Layer("head", words, tied="words", call=lambda module, value: value @ module.weight.T)
    return LayeredModel([Layer("words", words, tied="words"), head])


def refusals() -> dict[str, str]:
    """What a plan cannot be."""
    tried: dict[str, tuple[Callable[[], nn.Module], dict[str, str] | None]] = {
        "no plan": (tensor_parts.FusedVision, None),
        "nothing": (tensor_parts.FusedVision, {"block.*.mlp.1": "column"}),
        "no row": (tensor_parts.FusedVision, {"blocks.*.mlp.1": "column"}),
        "no column": (tensor_parts.FusedVision, {"blocks.*.mlp.3": "row"}),
        "no linear": (tensor_parts.FusedVision, {"blocks.*.norm": "column"}),
        "a weight": (
            tensor_parts.FusedVision,
            {"blocks.*.mlp.1": "column", "blocks.*.mlp.3": "row", "blocks.*.norm.weight": "column"},
        ),
        "uneven": (
            lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)),
            {"0": "column", "1": "row"},
        ),
        "attention of torch": (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2)),
            {"0": "column", "1.out_proj": "row"},
        ),
        "weight norm": (
            lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
            {"0": "column", "1": "row"},
        ),
        "heads": (lambda: tensor_parts.llama(key_heads=1), None),
        "tied": (lambda: tensor_parts.llama(tie=True), {"model.lm_head": "column_gathered"}),
        "by hand": (lambda: nn.Sequential(tensor_parts.ScaledByHand(8, 4)), {"0": "vocabulary"}),
        "head": (lambda: tensor_parts.Headed(num_layers=8), None),
        "own head": (own_head, {"words": "vocabulary"}),
        "heads of a block": (
            lambda: tensor_parts.without_plan("gpt2", num_attention_heads=1),
            None,
        ),
    }
    found = {}
    for name, (make, plan) in tried.items():
        try:
            cut(make(), Mean(), plan)
            found[name] = "cut"
        except ConfigError as error:
            found[name] = str(error)
    return found


def cut_by_layer(model: nn.Module, task: Task, plan: dict[str, str] | None = None) -> None:
    """Cut a model as a stage that has all of its layers."""
    given = None if plan is None else {name: TensorSplit(split=word) for name, word in plan.items()}  # type: ignore[arg-type]
    known = known_plan(model, given, size=2)
    cutting = TensorCut(None, given, task, known=known)
    for layer in as_layers(model):
        cutting.layer(layer.name, layer.build())
    cutting.check_stages()


def layer_by_layer() -> dict[str, Any]:
    """A stage's layers have the parts that the whole model has, and compute the same."""
    found: dict[str, Any] = {}
    for name, make, task in (("gpt", make_gpt, CausalLM()), ("bert", make_bert, MaskedLM())):
        model, other = make(2), cut(make(2), task)
        staged_task = type(task)()
        cut_by_layer(model, staged_task)
        pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
        found[name] = all(
            torch.equal(one, two) and vars(one) == vars(two) for (_, one), (_, two) in pairs
        )
        assert staged_task.vocabulary is not None
        found[f"{name} vocabulary"] = staged_task.vocabulary.widths
    model = make_gpt()
    cut_by_layer(model, CausalLM())
    found["outputs"] = torch.equal(model(_TOKENS), cut(make_gpt(), CausalLM())(_TOKENS))
    for name, plan in (
        ("apart", {"0": "column", "1": "row"}),
        ("idle", {"0": "column_gathered", "3": "column_gathered"}),
        ("within", {"0.0": "column", "0.1": "row"}),
    ):
        pair = (nn.Linear(4, 6), nn.Linear(6, 4))
        layers = nn.Sequential(*pair) if name != "within" else nn.Sequential(Two(*pair))
        try:
            cut_by_layer(layers, Mean(), plan)
            found[name] = "cut"
        except ConfigError as error:
            found[name] = str(error)
    return found


class Two(nn.Sequential):
    """One layer of a pipeline with two linear ones in it."""


def warnings_of_small_plans() -> list[str]:
    """What is printed of plans that leave most numbers whole, and of none that does not."""
    lines, warn = list[str](), tensor_cut.warn
    tensor_cut.warn = lambda text, **_: lines.append(text)  # type: ignore[assignment]
    try:
        cut(tensor_parts.Headed(num_layers=1), Mean())
        cut(tensor_parts.Headed(num_layers=8), Mean(), {"head": "column_gathered"})
        cut(tensor_parts.llama(), Mean())
    finally:
        tensor_cut.warn = warn
    return lines


def main() -> None:
    inputs = _TOKENS, torch.zeros_like(_TOKENS), torch.ones_like(_TOKENS)
    with process_group(None):
        swiglu = {"positions": "rotary", "mlp": "swiglu", "num_kv_heads": 2}
        found = {
            "gpt": per_block(make_gpt, CausalLM(), (_TOKENS,)),
            "llama": per_block(lambda number: make_gpt(number, **swiglu), CausalLM(), (_TOKENS,)),
            "bert": per_block(make_bert, MaskedLM(), inputs),
            "joined": weights_joined(),
            "whole": logits_whole(),
            "families": known_families(),
            "loss": vocabulary_loss(),
            "draws": dropouts(),
            "summed weight": summed_weight(),
            "refused": refusals(),
            "by layer": layer_by_layer(),
            "small": warnings_of_small_plans(),
        }
        if all(other == found for other in gather(found)) and torch.distributed.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
