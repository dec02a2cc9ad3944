"""A real SLURM of two nodes with eight GPUs each, all on this machine: Debian's daemons, started by hand.

The nodes are two `slurmd` on loopback, their GPUs links to /dev/null that SLURM hands out like real ones. The daemons
read their configuration from the default place alone, because Snakemake's jobs drop every variable of SLURM.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
SYSTEM = Path("/etc/slurm")
HOSTS = Path("/etc/hosts")
HOSTS_LINE = "127.0.0.1 n1 n2 # nodes of a test\n"
LOCK = Path("/tmp/dloop-test-slurm.lock")
SECONDS_TO_START = 30

CONFIGURATION = """
ClusterName=dlooptest
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
CredType=cred/munge
SlurmctldPort=16817
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MinJobAge=300
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=16 RealMemory=8000 \
Gres=gpu:h100:8 State=UNKNOWN
PartitionName=gpu Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""
GPUS = "NodeName=n[1-2] Name=gpu Type=h100 File={folder}/gpus/gpu[0-7] Flags=nvidia_gpu_env\n"


def reason_to_skip() -> str | None:
    """Why there can be no cluster on this machine, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "SLURM's daemons are started as root only"
    if (SYSTEM / "slurm.conf").exists() and not (SYSTEM / "slurm.conf").is_symlink():
        return f"this machine has a SLURM of its own ({SYSTEM}/slurm.conf), which is left alone"
    return None


def _path() -> str:
    return os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/sbin"])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """The cluster while the body runs; one at a time on a machine. Skips the test that asks where there can be none."""
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (SYSTEM / "slurm.conf").is_symlink():  # left by a test that was killed
            _stop((SYSTEM / "slurm.conf").readlink().parents[1])
        try:
            _start(folder)
            yield
        finally:
            _stop(folder)


def _start(folder: Path) -> None:
    for name in ("etc", "state", "spool", "log", "run", "gpus"):
        (folder / name).mkdir(parents=True)
    (folder / "etc").chmod(0o700)
    (folder / "run").chmod(0o755)
    (folder / "etc/munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "etc/munge.key").chmod(0o600)
    for number in range(8):
        (folder / f"gpus/gpu{number}").symlink_to("/dev/null")
    for name, text in (("slurm.conf", CONFIGURATION), ("gres.conf", GPUS)):
        (folder / "etc" / name).write_text(text.format(folder=folder))
        (SYSTEM / name).unlink(missing_ok=True)
        (SYSTEM / name).symlink_to(folder / "etc" / name)
    if HOSTS_LINE not in HOSTS.read_text():
        with open(HOSTS, "a") as hosts:
            hosts.write(HOSTS_LINE)
    munge = {"key-file": "etc/munge.key", "socket": "run/munge.socket", "pid-file": "run/munged.pid"}
    munge |= {"log-file": "log/munged.log", "seed-file": "etc/munge.seed"}
    # munged is content with no folder that others may write to, as temporary folders are.
    _run("munged", "--force", *(f"--{option}={folder / name}" for option, name in munge.items()))
    _run("slurmctld", "-c")
    for node in ("n1", "n2"):
        _run("slurmd", "-N", node)
    deadline = time.monotonic() + SECONDS_TO_START
    while _run("sinfo", "-h", "-N", "-o", "%T").split() != ["idle", "idle"]:
        assert time.monotonic() < deadline, "\n".join(log.read_text() for log in folder.glob("log/*.log"))
        time.sleep(0.1)


def _run(*words: str) -> str:
    done = subprocess.run(
        words, env={**os.environ, "PATH": _path()}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}"
    return done.stdout


def queue() -> list[str]:
    """States of the jobs that wait or run."""
    return _run("squeue", "-h", "-o", "%T").split()


def _stop(folder: Path) -> None:
    """End what was started here, jobs first, then daemons by their own process ids, and take the links away."""
    deadline = time.monotonic() + 10
    with contextlib.suppress(AssertionError):  # no controller answers any more
        _run("scancel", "--state=PENDING")
        _run("scancel", "--state=RUNNING")
        while queue() and time.monotonic() < deadline:
            time.sleep(0.1)
    pids = [
        int(file.read_text()) for file in sorted(folder.glob("run/*.pid"), reverse=True) if file.read_text().strip()
    ]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    for name in ("slurm.conf", "gres.conf"):
        (SYSTEM / name).unlink(missing_ok=True)
    HOSTS.write_text(HOSTS.read_text().replace(HOSTS_LINE, ""))
