"""Entry of train.py on every rank: reads its command line, trains, and turns every end into an exit
code.

Torch is imported after every check that does not need it; requests to stop are handled before that.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

from framework.errors import EXIT_OK, EXIT_TRAINING, FrameworkError, in_one_line, missing_package
from framework.system.command_parser import CommandParser, add_log_level
from framework.system.exits import SILENT_RANKS_WAIT_SECONDS, refusing_exits, report
from framework.system.garbage import collect_as_usual, collect_seldom
from framework.system.launcher_rank import take_rank
from framework.system.output import write
from framework.system.parent_watch import AGENT_VARIABLE, report_end, watch_parent
from framework.system.stopping import StopRequest

_OF_TRAINING: Final = ("torch", "deepspeed", "numpy", "pydantic", "yaml")


def _parser() -> CommandParser:
    parser = CommandParser(prog="train.py", description="Train one run.", allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="run config, YAML or JSON")
    # The deepspeed launcher adds the first, and deepspeed.add_config_arguments the other two.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--deepspeed_config", metavar="FILE", help="DeepSpeed JSON that decides a part of the run"
    )
    add_log_level(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that win over the file"
    )
    return parser


def _train(request: StopRequest, arguments: argparse.Namespace) -> None:
    """Load the run that the command line names, plan it for the ranks at hand, and train it."""
    collect_seldom()
    # Imported here, where requests to stop are handled already.
    from framework.load_run import load_run
    from framework.plan.cluster import Cluster

    run = load_run(
        arguments.config, arguments.overrides, deepspeed_config=arguments.deepspeed_config
    )
    has_launcher = AGENT_VARIABLE in os.environ  # which has printed the notes
    if not has_launcher and os.environ.get("RANK", "0") == "0":
        run.print_notes()
    cluster = Cluster.from_environment(os.environ)
    if run.config.auto:
        from framework.hosts.devices import find_devices

        run = run.started(replace(cluster, device=find_devices(os.environ).kind))
    plan = run.plan(cluster)  # before the seconds that torch takes to import
    from framework.training import fit_loaded

    gc.freeze()  # modules stay: no collection has to search them
    collect_as_usual()

    fit_loaded(plan, run.source, request, words=run.words, lookup=run.lookup)


def exit_code() -> int:
    """Train, and return the exit code of the process."""
    request = StopRequest()
    request.listen()
    try:
        take_rank(os.environ)
        watch_parent(
            os.environ, is_stopping=lambda: bool(request.signal), is_over=lambda: request.is_over
        )
        arguments = _parser().parse_args()
        with refusing_exits():
            _train(request, arguments)
        return EXIT_OK
    except FrameworkError as error:
        report(error, wait=partial(_wait_for_other_reports, request))
        return error.exit_code
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in _OF_TRAINING:
            missing = missing_package(error.name, what="training")
            report(missing, wait=partial(_wait_for_other_reports, request))
            return missing.exit_code
        report_end(in_one_line(error))
        write(sys.stderr, traceback.format_exc())
        return EXIT_TRAINING


def _wait_for_other_reports(request: StopRequest) -> None:
    """Wait until the rank that reports the error has had time to, or this one is to stop: a
    launcher ends all ranks when the first one ends.
    """
    if request.is_over:  # the run has ended, and rank 0 has reported it
        return
    request.run_has_failed()
    deadline = time.monotonic() + SILENT_RANKS_WAIT_SECONDS
    while not request.signal and time.monotonic() < deadline:
        time.sleep(0.02)


def main() -> NoReturn:
    """Train, and end this process."""
    code = exit_code()
    for stream in (sys.stdout, sys.stderr):
        write(stream, "")  # flush it, also if its reader has left
    # Not sys.exit: after a failure exit handlers would wait for ranks that are gone, and after
    # success DeepSpeed's native threads sometimes abort the interpreter on its way out, which would
    # turn a finished run into a failed one.
    os._exit(code)
