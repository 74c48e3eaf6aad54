"""A Slurm of two nodes on one machine, from Debian's slurm-wlm: munged, slurmctld, two slurmd, in a
folder of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.ports import free_ports
from tests.until import until

_PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "srun")
# Names that are addresses: nothing here resolves names of nodes, as a cluster's DNS does.
_NODES = ("127.0.0.2", "127.0.0.3")
# Jobs have the numbers of no other cluster: where ranks meet is made of the job's number, and all
# meet on this machine.
_CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={sockets}/munge.socket
SlurmctldPort={ports[0]}
FirstJobId={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={sockets}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillWait=30
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=debug Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why it cannot run here; empty if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no Slurm here ({missing[0]} is not on PATH; Debian: apt install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "starting Slurm's daemons needs root"
    return "" if len(os.sched_getaffinity(0)) > 1 else "each of the two nodes needs two cores"


class OneMachineSlurm:
    """The daemons run while the context lasts; they end with it, by process id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        # Not in pytest's folder: Slurm makes sockets here, and Linux takes no path of 108 bytes or
        # more for one.
        self._sockets = tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)

    def __enter__(self) -> OneMachineSlurm:
        sockets = Path(self._sockets.name)
        (self.folder / "state").mkdir(parents=True)
        for node in _NODES:
            (sockets / f"spool-{node}").mkdir()
        host = socket.gethostname().partition(".")[0]
        first = free_ports(3)
        ports = range(first, first + 3)
        config = _CONFIG.format(
            folder=self.folder, sockets=sockets, host=host, ports=ports, nodes=_NODES
        )
        (self.folder / "slurm.conf").write_text(config)
        key = self.folder / "munge.key"
        munge_socket = sockets / "munge.socket"
        subprocess.run(["mungekey", "--create", "--keyfile", key], check=True, timeout=60)
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={munge_socket}",
            *(f"--{name}-file={self.folder / name}" for name in ("log", "pid", "seed")),
        )
        until(munge_socket.exists, "munged opens no socket")
        self._start("slurmctld", "-D")
        for node in _NODES:
            self._start("slurmd", "-D", "-N", node)
        until(
            lambda: self.call("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"],
            "the nodes do not come up",
        )
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["scancel", "--user=root"], env=self.environment, timeout=60, check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._sockets.cleanup()

    def call(self, *command: str) -> str:
        """What a client prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout

    def end_of(self, job: str, expected: str) -> str:
        """State and exit code of a job, as soon as they are the expected ones, or after two
        minutes.
        """
        end = time.monotonic() + 120
        while True:
            shown = self.call("scontrol", "show", "job", job)
            found = " ".join(re.findall(r"(?:JobState|ExitCode)=(\S+)", shown))
            if found == expected or time.monotonic() > end:
                return found
            time.sleep(0.2)

    def _start(self, *command: str) -> None:
        log = (self.folder / "daemons.log").open("ab")
        with log:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            )
