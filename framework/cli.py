"""The command line. Modules that need more than the base install are imported when their command is
given.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Final

import framework
from framework.commands import check as checks
from framework.commands import report as reports
from framework.errors import (
    EXIT_OK,
    EXIT_TRAINING,
    EXIT_USAGE,
    ConfigError,
    FrameworkError,
    UsageError,
    missing_package,
)
from framework.plan.cluster import Cluster
from framework.system.arguments import CommandParser, add_option, whole
from framework.system.exits import refusing_exits
from framework.system.output import write

# a check of DeepSpeed JSON needs neither, and their import takes a tenth of a second
if TYPE_CHECKING:
    from framework.config.load import Source
    from framework.plan.plan import Plan

# Commands that need more than the base install. Their modules may import torch: they are imported
# by name when the command is given, and by nothing else here. Each has `main(words) -> exit code`.
_WITH_TORCH: Final[Mapping[str, str]] = {
    "prepare": "framework.data.prepare",
    "generate": "framework.commands.generate",
    "export": "framework.commands.export",
    "evaluate": "framework.commands.evaluate",
    "predict": "framework.commands.predict",
    "lr-range": "framework.commands.lr_range",
}
# Commands with a parser of their own -> their line in the list of all commands.
_ELSEWHERE: Final[Mapping[str, str]] = {
    "prepare": "turn text into numbered tokens: prepare INPUT... OUT_DIR",
    "generate": "print a sample of text from a checkpoint of a GPT: generate CHECKPOINT --prompt "
    "TEXT",
    "export": "write the weights of a checkpoint as safetensors: export CHECKPOINT OUT",
    "evaluate": "measure a checkpoint: evaluate CHECKPOINT [key=value ...]",
    "predict": "write what a model makes of inputs: predict CHECKPOINT INPUT... --out FILE",
    "lr-range": "find a learning rate: lr-range CONFIG [key=value ...] [--from LR] [--to LR] "
    "[--steps N]",
    "doctor": "is this machine, or are these hosts, fit to train? doctor [CONFIG] [-H HOSTFILE] "
    "[--bench]",
    "bench": "time variants of a run: bench CONFIG... [key=value ...] [--variant NAME key=value "
    "...] [--num_gpus 1,2]",
    "launch": "train: launch CONFIG [key=value ...] [-H HOSTFILE]; also launch node, k8s, slurm",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a file name may be any bytes
    if argv is None:
        argv = sys.argv[1:]
    words = list(argv)
    try:
        code = _run(words)
        # here, and not at exit, where it would be an error message if the reader has left
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed its end
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if _starts_a_run(words):  # the reader has not seen how the run ended
            return EXIT_TRAINING
        return EXIT_OK
    except KeyboardInterrupt:
        return 130
    return code


def _starts_a_run(words: Sequence[str]) -> bool:
    return words[:1] == ["launch"] and words[1:2] not in (["k8s"], ["slurm"])


def _run(words: Sequence[str]) -> int:
    try:
        if words[:2] == ["launch", "k8s"]:
            from framework.deploy.k8s.command import main as print_manifests

            return print_manifests(words[2:])
        if words[:2] == ["launch", "slurm"]:
            from framework.deploy.slurm import main as print_script

            return print_script(words[2:])
        if words[:1] == ["launch"]:
            from framework.launch.local import launch

            return launch(words[1:])
        if words[:1] == ["bench"]:
            from framework.commands.bench import bench

            return bench(words[1:])
        if words[:1] == ["doctor"]:
            from framework.commands.doctor import doctor

            return doctor(words[1:])
        if words and words[0] in _WITH_TORCH:
            return _run_with_torch(words[0], words[1:])
        if not words:
            print(_parser().format_help(), end="", file=sys.stderr)
            return EXIT_USAGE
        arguments = _parse(words)
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except FrameworkError as error:
        write(sys.stderr, f"{error}\n")
        return error.exit_code


def _run_with_torch(command: str, words: Sequence[str]) -> int:
    try:
        # DeepSpeed prints the device that it found when it is imported
        with contextlib.redirect_stdout(io.StringIO()):
            module = importlib.import_module(_WITH_TORCH[command])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "framework":
            raise
        raise missing_package(error.name, what=command) from error
    with refusing_exits():  # the user's code runs there
        code: int = module.main(words)
    return code


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Settings may also stand behind options: argparse alone takes
    positional words from one place only.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    unrecognized = rest
    if hasattr(arguments, "words"):
        unrecognized = [word for word in rest if word.startswith("-")]
    if unrecognized:
        parser.error(f"unrecognized arguments: {' '.join(unrecognized)}")
    if rest:
        arguments.words += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m framework", description="Typed training runs on DeepSpeed."
    )
    parser.add_argument(
        "--version", action="version", version=f"dsf-trainer {framework.__version__}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    check = commands.add_parser(
        "check", help="find everything that is wrong with run configs or DeepSpeed JSON"
    )
    checks.add_options(check)
    check.set_defaults(command=_check)
    plan = commands.add_parser("plan", help="say what will happen on a cluster")
    _add_plan_options(plan)
    plan.set_defaults(command=_plan)
    render = commands.add_parser("render", help="print the DeepSpeed JSON")
    render.set_defaults(command=_render)
    for command in (plan, render):
        command.add_argument("--gpu", metavar="KIND", help="for this device, for example h100-80gb")
        command.add_argument("file", metavar="FILE", help="run config, YAML or JSON")
        command.add_argument(
            "words",
            nargs="*",
            default=[],
            metavar="key=value",
            help="settings that win over the file",
        )
    devices = whole(1, 10**18, "{} is not a number of devices; write 1 or more")
    for command in (check, plan, render):
        where = command.add_mutually_exclusive_group()
        where.add_argument(
            "--num_gpus", "--num-gpus", type=devices, metavar="N", help="devices on one host"
        )
        command.add_argument(
            "--nodes", type=devices, metavar="N", help="hosts, each with --num_gpus devices"
        )
        where.add_argument(
            "-H",
            "--hostfile",
            metavar="FILE",
            help="hosts and their devices, in DeepSpeed's format",
        )
    _add_others(commands)
    for name, help_ in _ELSEWHERE.items():
        commands.add_parser(name, help=help_)
    return parser


def _add_plan_options(plan: argparse.ArgumentParser) -> None:
    """Add the options of `plan` beside file, settings and cluster."""
    option = plan.add_argument
    option("--json", action="store_true", help="print the plan as JSON")
    about = "explain an out-of-memory message by this plan: a rank's log, or - for stdin"
    option("--explain-oom", metavar="LOG", help=about)
    option(
        "--measure",
        action="store_true",
        help="measure this machine's rates first, about half a minute",
    )
    count = whole(1, 1000, "{} is not a number of strategies")
    about = "run the best N for some steps each, here; implies --search"
    add_option(plan, "--trials", type=count, metavar="N", help=about)
    option(
        "--network",
        metavar="NAME",
        help="between hosts, where it is not the usual one, such as infiniband-hdr",
    )
    option(
        "--search",
        action="store_true",
        help="choose micro-batch, accumulation and pipeline as well",
    )
    about = "what the best strategy has most of, or takes least of; implies --search"
    option("--goal", choices=("throughput", "fewest-devices", "longest-sequence"), help=about)
    add_option(plan, "--top", type=count, metavar="N", help="show so many")
    option(
        "--apply",
        action="store_true",
        help="write the best strategy into the file; implies --search",
    )
    option(
        "--paper",
        action="store_true",
        help="the usual formulas beside it, and goodput between failures",
    )
    option(
        "--chart",
        metavar="FILE.svg",
        help="draw the memory of the best strategies; implies --search",
    )


def _add_others(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the commands that plan nothing."""
    about = "print the JSON Schema of run configs or DeepSpeed JSON, for editors"
    schema = commands.add_parser("schema", help=about)
    schema.set_defaults(command=_schema)
    schema.add_argument(
        "of", nargs="?", choices=("run", "deepspeed"), default="run", help="what is described"
    )
    schema.add_argument(
        "--deepspeed", metavar="RELEASE", help="of this release, for example 0.18.9"
    )
    turn = commands.add_parser(
        "import",
        help="print the run config that a file of DeepSpeed or of another trainer amounts to",
    )
    turn.set_defaults(command=_import)
    turn.add_argument(
        "file",
        metavar="FILE",
        help="DeepSpeed JSON, TrainingArguments, accelerate's or Lightning's config",
    )
    turn.add_argument(
        "--deepspeed", metavar="RELEASE", help="as this release reads it, for example 0.18.9"
    )
    new = commands.add_parser(
        "new", help="write a small project that trains at once: model, data, task, config, test"
    )
    new.set_defaults(command=_new)
    new.add_argument("name", metavar="NAME", help="of the project and its folder")
    about = "say what a checkpoint is, and whether its files are as they were written"
    inspect = commands.add_parser("inspect", help=about)
    inspect.set_defaults(command=_inspect)
    option = inspect.add_argument
    place = "a folder global_step<N>, or a run: all of its checkpoints"
    option("path", metavar="CHECKPOINT|RUN", help=place)
    option("--json", action="store_true", help="print it as JSON")
    option(
        "--no-verify",
        action="store_true",
        help="read the manifest only, not every byte of every file",
    )
    option(
        "--allow-unverified",
        action="store_true",
        help="describe what DeepSpeed wrote without a manifest",
    )
    reports.add_options(
        commands.add_parser("report", help="write a page on one run, or on several over each other")
    )


def _check(arguments: argparse.Namespace) -> int:
    return checks.run_check(arguments, find_cluster=_cluster)


def _plan(arguments: argparse.Namespace) -> int:
    from framework.commands.plan import run_plan
    from framework.load_run import load_run

    return run_plan(arguments, load_run(arguments.file, arguments.words), _cluster(arguments))


def _render(arguments: argparse.Namespace) -> int:
    from framework.commands.target_search import missing_targets
    from framework.plan.render import render

    plan, source = _make_plan(arguments)
    try:
        ds_config = render(plan)
    except ConfigError as error:
        raise ConfigError(map(source.locate, error.problems)) from None
    for warning in missing_targets(plan.config):
        write(sys.stderr, f"warning: {source.locate(warning)}\n")
    print(json.dumps(ds_config, indent=2))
    return EXIT_OK


def _schema(arguments: argparse.Namespace) -> int:
    if arguments.of == "deepspeed":
        from framework.dslint.schema import deepspeed_schema

        print(json.dumps(deepspeed_schema(arguments.deepspeed), indent=2))
    elif arguments.deepspeed:
        raise UsageError(
            "schema: --deepspeed goes with `schema deepspeed`; a run config has one schema"
        )
    else:
        from framework.config.schema import schema_text

        print(schema_text(), end="")
    return EXIT_OK


def _import(arguments: argparse.Namespace) -> int:
    from framework.dslint.import_run import import_document, run_config_text
    from framework.dslint.import_trainers import import_arguments, read_arguments
    from framework.dslint.readers import read_deepspeed_json

    path = Path(arguments.file)
    name = arguments.file
    trainer_arguments = read_arguments(path, name=name)
    if trainer_arguments is not None:
        imported = import_arguments(trainer_arguments)
    else:
        document = read_deepspeed_json(path, name=name)
        if document is None:
            takes = (
                "DeepSpeed JSON, TrainingArguments, an accelerate config or Lightning's CLI config"
            )
            raise UsageError(f"{name}: this is a run config already; import takes {takes}")
        imported = import_document(document, release=arguments.deepspeed)
    print(run_config_text(imported, name=name), end="")
    return EXIT_OK


def _new(arguments: argparse.Namespace) -> int:
    from framework.commands.new import new

    written = new(arguments.name)
    print("\n".join(map(str, written)))
    print(f"\ncd {arguments.name}\npython -m framework launch run.yaml")
    return EXIT_OK


def _inspect(arguments: argparse.Namespace) -> int:
    from framework.commands.inspect import run_inspect

    return run_inspect(
        arguments.path,
        as_json=arguments.json,
        verify=not arguments.no_verify,
        allow_unverified=arguments.allow_unverified,
    )


def _make_plan(arguments: argparse.Namespace) -> tuple[Plan, Source]:
    from framework.load_run import load_run

    run = load_run(arguments.file, arguments.words)
    cluster = _cluster(arguments)
    if run.config.auto and arguments.gpu:
        from framework.plan.auto import listed_target

        devices_per_host = 1
        if cluster:
            devices_per_host = cluster.devices_per_host
        target = listed_target(arguments.gpu, devices_per_host=devices_per_host)
        run = run.chosen(cluster, target)
    run = run.chosen(cluster)
    if run.choice:
        write(sys.stderr, f"{run.choice}\n")
    return run.plan(cluster), run.source


def _cluster(arguments: argparse.Namespace) -> Cluster | None:
    if arguments.num_gpus is not None:
        return Cluster(num_hosts=arguments.nodes or 1, devices_per_host=arguments.num_gpus)
    if arguments.nodes is not None:
        raise UsageError("--nodes: how many devices does each host have? give --num_gpus as well")
    if arguments.hostfile is None:
        return None
    from framework.launch.hosts.hostfile import cluster_of, read_hostfile

    return cluster_of(read_hostfile(arguments.hostfile), path=arguments.hostfile)
