"""Starts a stage on n nodes with g GPUs each: plain Python, torchrun on this machine, or one torchrun a node.

It becomes the program it starts, so signals and the exit code need no handing on. Several nodes are those of the SLURM
job it runs in, or, without SLURM, those on which somebody calls it by hand with the variables NNODES, NODE_RANK,
MASTER_ADDR and MASTER_PORT, which win over `--nodes`. Knows nothing about what it starts.

    python -m dloop.launch --gpus-per-node 8 -- dloop.train --target-model-path ...
    NNODES=2 NODE_RANK=0 MASTER_ADDR=node1 python -m dloop.launch --gpus-per-node 8 -- dloop.train ...
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dloop.cli import UserError, parse, run

FIRST_PORT, PORTS = 20_000, 20_000
"""Jobs that share a node need ports of their own: one from this range, by job id."""
MANUAL_PORT = 29_500


@dataclass(frozen=True, kw_only=True)
class Options:
    """Start a module on one or more nodes; the module and its arguments stand behind `--`."""

    nodes: int = 1
    """Nodes of the SLURM job. Without SLURM set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT on each node instead."""
    gpus_per_node: int = 1
    """Processes on each node, one a GPU; 0 or 1: no torchrun on a single node."""


Command = list[str]


def torchrun(options: Options, module: Sequence[str], *rendezvous: str) -> Command:
    """torchrun of this interpreter, which needs no program on the PATH."""
    processes = max(1, options.gpus_per_node)
    start = [sys.executable, "-m", "torch.distributed.run"]
    return [*start, *rendezvous, f"--nproc_per_node={processes}", "-m", *module]


def on_this_node(options: Options, module: Sequence[str]) -> Command:
    """One process, or one for each GPU."""
    if options.gpus_per_node <= 1:
        return [sys.executable, "-m", *module]
    return torchrun(options, module, "--standalone")


def one_of_several(options: Options, module: Sequence[str], environment: Mapping[str, str]) -> Command:
    """This node's part of a run on NNODES nodes; inside srun SLURM knows the node's rank."""
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if name not in environment]
    if missing:
        raise UserError(
            f"NNODES is {environment['NNODES']}, but {' and '.join(missing)} is not set: every node needs NODE_RANK "
            "(0, 1, ...) and MASTER_ADDR (the name of node 0)"
        )
    nodes, rank = _number(environment, "NNODES"), _number(environment, "NODE_RANK")
    if not 0 <= rank < nodes:
        raise UserError(f"NODE_RANK is {rank}, but with NNODES={nodes} it must be from 0 to {nodes - 1}")
    port = _number(environment, "MASTER_PORT", MANUAL_PORT)
    address = environment["MASTER_ADDR"]
    rendezvous = (f"--nnodes={nodes}", f"--node_rank={rank}", f"--master_addr={address}", f"--master_port={port}")
    return torchrun(options, module, *rendezvous)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise UserError(f"{name} is {text!r}, but must be a whole number") from error


def on_slurm_nodes(options: Options, module: Sequence[str], job: str) -> Command:
    """srun of this launcher on every node of the job, which then is `one_of_several`."""
    facts = _scontrol("show", "job", job, "--oneliner")
    hosts = _scontrol("show", "hostnames", _field(facts, "NodeList")).split()
    if len(hosts) != options.nodes:
        raise UserError(
            f"--nodes is {options.nodes}, but job {job} has {len(hosts)} ({' '.join(hosts)}): "
            "`nodes` and `tasks` of the rule in the profile must be the same number"
        )
    variables = f"NNODES={len(hosts)},MASTER_ADDR={hosts[0]},MASTER_PORT={FIRST_PORT + int(job) % PORTS}"
    srun = ["srun", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    # srun does not inherit the cores of the job.
    srun += [f"--cpus-per-task={_field(facts, 'CPUs/Task')}", f"--export=ALL,{variables}"]
    launcher = [sys.executable, "-m", "dloop.launch", f"--gpus-per-node={options.gpus_per_node}", "--", *module]
    return [*srun, *launcher]


def _scontrol(*arguments: str) -> str:
    """What scontrol prints. Snakemake removes SLURM's own variables from a job, so that only it knows the nodes."""
    try:
        return subprocess.run(["scontrol", *arguments], check=True, text=True, capture_output=True).stdout
    except FileNotFoundError as error:
        raise UserError("several nodes are asked for, but there is no `scontrol` here to tell them") from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"scontrol {' '.join(arguments)} failed: {error.stderr.strip()}") from error


def _field(facts: str, name: str) -> str:
    # The blank tells NodeList from ReqNodeList and ExcNodeList.
    found = re.search(rf"(?:^|\s){re.escape(name)}=(\S+)", facts)
    if not found:
        raise UserError(f"scontrol does not tell {name} of the job: {facts.strip()[:200]!r}")
    return found[1]


def command(options: Options, module: Sequence[str], environment: Mapping[str, str]) -> Command:
    """What is started for `options` in `environment`. Raises `UserError` where nobody names the nodes asked for."""
    if not module:
        raise UserError("nothing to start: write the module and its arguments behind --")
    if options.nodes < 1 or options.gpus_per_node < 0:
        raise UserError(f"--nodes {options.nodes} --gpus-per-node {options.gpus_per_node}: there are no such machines")
    if _number(environment, "NNODES", 1) < 1:
        raise UserError(f"NNODES is {environment['NNODES']}, but must be at least 1")
    if _number(environment, "NNODES", 1) > 1:
        rank = {"NODE_RANK": environment["SLURM_NODEID"]} if "SLURM_NODEID" in environment else {}
        return one_of_several(options, module, {**rank, **environment})
    if options.nodes == 1:
        return on_this_node(options, module)
    if "SLURM_JOB_ID" not in environment:
        raise UserError(
            f"--nodes is {options.nodes}, but this is no SLURM job: set NNODES, NODE_RANK, MASTER_ADDR and "
            "MASTER_PORT on every node instead"
        )
    return on_slurm_nodes(options, module, environment["SLURM_JOB_ID"])


def main() -> None:
    """Become the program the command line asks for."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    started = command(parse(Options, words[:end]), words[end + 1 :], os.environ)
    try:
        os.execvp(started[0], started)
    except FileNotFoundError as error:
        raise UserError(f"there is no {started[0]} here: load the cluster's SLURM programs first") from error


if __name__ == "__main__":
    run(main)
