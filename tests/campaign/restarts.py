"""Kill what a supervised job consists of again and again: python -m tests.campaign.restarts --kills
20 [--nodes 3]

With `supervision.max_restarts` it starts again by itself. One `launch` of two ranks; or with
`--nodes` as many `launch node`, each an agent with a rank, which meet with a token. A kill
(SIGKILL) of a rank, of all ranks, of a process that a rank started (its data worker, its writer of
checkpoints), of an agent (node 0's as well) or of an agent and its rank comes at a random instant:
some time after the last checkpoint of a start, or, every fifth at most, while a start still
imports. An agent that was killed is started again a moment later, as Kubernetes and systemd do, and
is all that anybody does. The job must end with 0, and with the losses and the last checkpoint's
bits of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from framework.checkpoint.manifest import list_checkpoints
from framework.report.figures import goodput_line
from framework.report.goodput import goodput
from framework.report.records import read_run
from tests.campaign.traces import differences
from tests.launched import job_environment
from tests.places import ROOT
from tests.ports import free_ports
from tests.warm_ranks import WarmRanks

STEPS_PER_KILL, GLOBAL_SIZE = 30, 120
WHOLE_SECONDS = 600.0
BACK_SECONDS = 0.5  # until who watches over an agent starts it again


def write_config(folder: Path, name: str, *, steps: int) -> Path:
    config: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [64, 64], "dropout": 0.3},
        "data": {
            "target": "tests.jobs.parts:slow_images",
            "args": {"seconds": 0.001, "eval_seconds": 0.0},
            "num_workers": 1,
        },
        "batch": {"global_size": GLOBAL_SIZE},
        "zero": {"stage": 2},
        "training": {"max_steps": steps, "log_every": 1},
        "evaluation": {"at_end": False},
        "checkpoint": {"every_steps": 10, "keep_last": 2, "mode": "async"},
        "supervision": {"max_restarts": 1000, "wait_seconds": 0.5},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


class Job:
    """One launch of two ranks."""

    def __init__(self, config: Path) -> None:
        self.log = config.with_suffix(".log").open("w")
        self.num_ranks = 2
        self.words = [["launch", str(config), "--num_gpus", "2"]]
        self.agents = [self.start(node) for node in range(len(self.words))]

    def start(self, node: int) -> subprocess.Popen[str]:
        environment = job_environment() | {"DS_ACCELERATOR": "cpu"}
        words = [sys.executable, "-m", "framework", *self.words[node]]
        return subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=self.log, stderr=self.log, text=True
        )

    def ranks(self, nodes: Sequence[int] | None = None) -> list[psutil.Process]:
        """Of some agents, or of all."""
        found = []
        for node in range(len(self.agents)) if nodes is None else nodes:
            with suppress(psutil.Error):
                children = psutil.Process(self.agents[node].pid).children()
                found += [each for each in children if "RANK" in each.environ()]
        return found

    def codes(self) -> list[int] | None:
        """Exit codes, once all agents have ended."""
        codes = [agent.poll() for agent in self.agents]
        return None if None in codes else [int(code or 0) for code in codes]

    @property
    def kinds(self) -> list[str]:
        """What can be killed."""
        return ["rank", "ranks", "child"]

    def kill(self, kind: str, draw: random.Random) -> None:
        """Kill something, ``agent:0`` for that of node 0, and bring back an agent."""
        kind, _, number = kind.partition(":")
        node = int(number) if number else draw.randrange(len(self.agents))
        ranks = self.ranks()
        victims = [draw.choice(ranks)] if kind == "rank" else ranks if kind == "ranks" else []
        victims += self.ranks([node]) if kind == "node" else []
        if kind == "child" and ranks:
            with suppress(psutil.Error):
                victims += draw.sample(
                    children := draw.choice(ranks).children(), min(1, len(children))
                )
        if kind in ("agent", "node"):
            self.agents[node].kill()
        for victim in victims:
            with suppress(psutil.Error):
                victim.kill()
        if kind in ("agent", "node"):
            self.agents[node].wait()
            time.sleep(BACK_SECONDS)
            self.agents[node] = self.start(node)


class NodesJob(Job):
    """Agents of several nodes, with a rank each."""

    def __init__(self, config: Path, nodes: int) -> None:
        self.log = config.with_suffix(".log").open("w")
        self.num_ranks = nodes
        (token := config.with_suffix(".token")).write_text(secrets.token_hex(16))
        common = [
            "--nnodes",
            str(nodes),
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            str(free_ports(2)),
        ]
        common += ["--num_gpus", "1", "--token_file", str(token)]
        self.words = [
            ["launch", "node", str(config), "--node_rank", str(node), *common]
            for node in range(nodes)
        ]
        self.agents = [self.start(node) for node in range(nodes)]

    @property
    def kinds(self) -> list[str]:
        """What can be killed."""
        return ["rank", "ranks", "child", "agent", "node"]


def begun(run: Path) -> list[float]:
    """When each start had come to its first step."""
    with suppress(OSError):
        events = [
            json.loads(line)
            for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        return [event["time_seconds"] for event in events if event["kind"] in ("start", "resume")]
    return []


def newest(run: Path) -> int:
    return max((checkpoint.step for checkpoint in list_checkpoints(run / "checkpoints")), default=0)


def until(job: Job, holds: Callable[[], bool]) -> bool:
    """Wait; returns False where the job has ended before."""
    while job.codes() is None:
        if holds():
            return True
        time.sleep(0.02)
    return False


def campaign(
    folder: Path,
    kills: int,
    *,
    seed: int,
    nodes: int = 0,
    kinds: Sequence[str] = (),
    others_from: WarmRanks,
) -> dict[str, Any]:
    """Run it; returns what was counted and measured. `kinds`: in this order, instead of at random.
    `others_from` starts the undisturbed run.
    """
    draw, run, steps = random.Random(seed), folder / "killed", STEPS_PER_KILL * (kills + 1)

    def is_over(pids: set[int], kind: str, saved: int) -> bool:
        """Another start has begun; a rank without its writer makes another one, and goes on."""
        return not pids & {each.pid for each in job.ranks()} or (
            kind == "child" and newest(run) > saved
        )

    config = write_config(folder, "killed", steps=steps)
    job = NodesJob(config, nodes) if nodes else Job(config)
    recoveries, was_early, done = [], False, Counter[str]()
    while done.total() < kills and job.codes() is None:
        starts, saved = len(begun(run)), newest(run)
        is_early = not kinds and not was_early and done.total() > 0 and draw.random() < 0.2
        if is_early:
            until(job, lambda: len(job.ranks()) == job.num_ranks)
            time.sleep(draw.uniform(0.0, 3.0))
        elif not until(job, lambda saved=saved: newest(run) > saved):
            break
        else:
            time.sleep(draw.uniform(0.0, 1.0))
        victims = job.ranks()
        if len(victims) < job.num_ranks:
            continue
        killed_at, starts = time.time(), len(begun(run))
        kind = kinds[done.total()] if kinds else draw.choice(job.kinds)
        saved = newest(run)
        job.kill(kind, draw)
        done, was_early = done + Counter([kind]), is_early
        print(f"{done.total()}: {kind}", file=sys.stderr, flush=True)

        until(job, partial(is_over, {each.pid for each in victims}, kind, saved))
        if kind == "child" and len(begun(run)) == starts and newest(run) > saved:
            continue
        if not is_early and until(job, lambda starts=starts: len(begun(run)) > starts):
            recoveries.append(begun(run)[-1] - killed_at)
    until(job, lambda: False)
    config = write_config(folder, "whole", steps=steps)
    whole = others_from.start(
        ["--config", str(config)], num_ranks=job.num_ranks, folder=folder / "said"
    )
    assert set(whole.wait(WHOLE_SECONDS)) == {0}, whole.stated()
    found = differences(folder / "whole", run, num_steps=steps)
    # A start from the beginning ends with the same bits, and moves what there was aside.
    found += [
        f"{path}: set aside by a start from the beginning"
        for path in folder.glob("killed?*/")
        if path.is_dir()
    ]
    print("\n".join(found), file=sys.stderr)
    recoveries.sort()
    spent = goodput(read_run(run))
    return {
        "kills": done.total(),
        "of": dict(done),
        "codes": job.codes(),
        "equal": not found,
        "recovery_seconds": {
            "p50": round(statistics.median(recoveries), 2),
            "p95": round(recoveries[int(0.95 * len(recoveries))], 2),
        },
        "goodput": "" if spent is None else goodput_line(spent),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--nodes", type=int, default=0, help="agents of `launch node`; 0: one `launch`"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, WarmRanks() as warm:
        found = campaign(
            Path(folder), given.kills, seed=given.seed, nodes=given.nodes, others_from=warm
        )
        for log in Path(folder).glob("*.log"):
            Path(tempfile.gettempdir(), f"restarts-{log.name}").write_text(log.read_text())
    print(json.dumps(found))
    return 0 if found["equal"] and set(found["codes"]) == {0} else 1


if __name__ == "__main__":
    sys.exit(main())
