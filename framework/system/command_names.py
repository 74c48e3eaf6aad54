"""The commands of `dsf` as its help lists them: in groups, each with a line, examples and its
page.

A parser finds here what stands below its own help; where a command begins is in
`framework.commands.table`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PROGRAM: Final = "dsf"


@dataclass(frozen=True)
class CommandName:
    """A command in the help.

    Attributes:
        name: the words that call it.
        help: its line in the list of all commands.
        examples: command lines as they are typed; the first one stands in the list.
        page: its page of the documentation.
    """

    name: str
    help: str
    examples: tuple[str, ...]
    page: str


GROUPS: Final[Mapping[str, tuple[CommandName, ...]]] = {
    "write a run config": (
        CommandName(
            "new",
            "write a small project that trains at once",
            ("dsf new mine",),
            "docs/tutorials/own-model.md",
        ),
        CommandName(
            "keys",
            "find a key: its type, default, meaning and an example",
            ("dsf keys learning_rate", "dsf keys checkpoint", "dsf keys unknown-key"),
            "docs/check.md",
        ),
        CommandName(
            "schema",
            "print the JSON Schema of run configs, for editors",
            ("dsf schema > run.schema.json", "dsf schema deepspeed"),
            "docs/check.md",
        ),
        CommandName(
            "import",
            "print the run config that a file of another trainer amounts to",
            ("dsf import ds_config.json > run.yaml", "dsf import training_args.json"),
            "docs/tutorials/from-huggingface.md",
        ),
    ),
    "before it starts": (
        CommandName(
            "check",
            "find everything that is wrong with run configs or DeepSpeed JSON",
            (
                "dsf check run.yaml --num_gpus 8",
                "dsf check run.yaml --fix",
                "dsf check ds_config.json --nodes 2 --num_gpus 8",
            ),
            "docs/check.md",
        ),
        CommandName(
            "plan",
            "describe batch, length, memory and time on any cluster",
            (
                "dsf plan run.yaml --num_gpus 8 --gpu h100-80gb",
                "dsf plan run.yaml --num_gpus 8 --gpu h100-80gb --search",
                "dsf plan run.yaml --num_gpus 2 --measure",
            ),
            "docs/planner.md",
        ),
        CommandName(
            "render",
            "print the DeepSpeed JSON, with every value filled in",
            ("dsf render run.yaml --num_gpus 8 > ds_config.json",),
            "docs/start.md",
        ),
        CommandName(
            "doctor",
            "find out whether this machine, or hosts, are fit to train",
            (
                "dsf doctor run.yaml",
                "dsf doctor run.yaml -H hostfile",
                "dsf doctor run.yaml --bench",
            ),
            "docs/launch.md",
        ),
        CommandName(
            "lr-range",
            "find a learning rate",
            ("dsf lr-range run.yaml --from 1e-6 --to 1 --steps 100",),
            "docs/optimizers.md",
        ),
        CommandName(
            "prepare",
            "turn text into numbered tokens",
            (
                "dsf prepare corpus/*.txt tokens/",
                "dsf prepare rows.jsonl tokens/ --tokenizer tokenizer.json",
            ),
            "docs/text.md",
        ),
    ),
    "train": (
        CommandName(
            "train",
            "train on this machine, or with -H on the hosts of a hostfile",
            (
                "dsf train run.yaml",
                "dsf train run.yaml optimizer.lr=1e-3 run.name=second --num_gpus 2",
                "dsf train run.yaml checkpoint.resume=auto",
                "dsf train run.yaml -H hostfile",
            ),
            "docs/launch.md",
        ),
        CommandName(
            "launch",
            "the same as train",
            ("dsf launch run.yaml --dry_run",),
            "docs/launch.md",
        ),
        CommandName(
            "launch node",
            "be one member of a job without ssh: in a pod, under srun",
            ("dsf launch node run.yaml --nnodes 2 --node_rank 0 --no_token",),
            "docs/launch.md",
        ),
        CommandName(
            "launch k8s",
            "print the Kubernetes objects of a run, or check manifests",
            (
                "dsf launch k8s run.yaml --nodes 2 --gpus 8 --image IMAGE --ckpt_pvc runs",
                "dsf launch k8s --lint job.yaml",
            ),
            "docs/kubernetes.md",
        ),
        CommandName(
            "launch slurm",
            "print the batch script of a run",
            ("dsf launch slurm run.yaml --nodes 2 --gpus 8 --out job.sbatch",),
            "docs/slurm.md",
        ),
    ),
    "this shell": (
        CommandName(
            "completion",
            "let bash, zsh or fish complete commands, options and keys",
            (
                "dsf completion bash > ~/.local/share/bash-completion/completions/dsf",
                "dsf completion fish > ~/.config/fish/completions/dsf.fish",
            ),
            "docs/start.md",
        ),
    ),
    "look at a run, and use it": (
        CommandName(
            "report",
            "write a page on one run, or on several over each other",
            ("dsf report runs/first", "dsf report runs/a runs/b --out a-and-b.html"),
            "docs/report.md",
        ),
        CommandName(
            "inspect",
            "describe a checkpoint, and check that its files are whole",
            ("dsf inspect runs/first", "dsf inspect runs/first/checkpoints/global_step100"),
            "docs/resume.md",
        ),
        CommandName(
            "evaluate",
            "measure a checkpoint",
            (
                "dsf evaluate runs/first",
                "dsf evaluate runs/first --step best evaluation.max_samples=1000",
            ),
            "docs/after-training.md",
        ),
        CommandName(
            "predict",
            "write what a model makes of inputs",
            ("dsf predict runs/first images/ --out classes.jsonl",),
            "docs/after-training.md",
        ),
        CommandName(
            "generate",
            "print text from a checkpoint of a GPT",
            ('dsf generate runs/gpt_tiny --prompt "import os" --temperature 0.7',),
            "docs/text.md",
        ),
        CommandName(
            "export",
            "write the weights of a checkpoint for other programs",
            ("dsf export runs/first out", "dsf export runs/first out --format hf --step best"),
            "docs/resume.md",
        ),
        CommandName(
            "trust",
            "let checkpoints in a folder call the code that they name",
            ("dsf trust shared/runs", "dsf trust", "dsf trust --remove shared/runs"),
            "docs/after-training.md",
        ),
        CommandName(
            "bench",
            "time variants of a run, one after another and interleaved",
            (
                "dsf bench run.yaml --num_gpus 1,2",
                "dsf bench run.yaml --variant a --variant b precision.dtype=bf16",
            ),
            "docs/bench.md",
        ),
    ),
}
BY_NAME: Final[Mapping[str, CommandName]] = {
    command.name: command for commands in GROUPS.values() for command in commands
}


def listed_groups(others: Mapping[str, str]) -> str:
    """Return all commands in their groups, a line and an example for each, at most 80 columns wide.

    Args:
        others: commands of installed packages, name -> line.
    """
    lines: list[str] = []
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        for command in commands:
            lines.append(f"  {command.name:<12}  {command.help}")
            lines.append(f"      {command.examples[0]}")
    if others:
        lines += ["", "of installed packages:"]
        lines += [f"  {name:<12}  {text}" for name, text in others.items()]
    return "\n".join(lines[1:])


def epilog_of(prog: str) -> str:
    """Return what stands below the help of a program's command: its examples and its page."""
    command = BY_NAME.get(prog.removeprefix(f"{PROGRAM} "))
    if command is None:
        return ""
    title = "example" if len(command.examples) == 1 else "examples"
    lines = [f"{title}:", *(f"  {example}" for example in command.examples), ""]
    return "\n".join([*lines, f"more: {command.page}"])
