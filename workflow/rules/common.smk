# The checked configuration, and the functions that turn wildcards into inputs, flags and environments.
# Rules call these; what a flag's value is, dloop/config.py knows.
import json
import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from dloop.cli import UserError
from dloop.config import Configuration, command_line

# Jobs call `python`: the interpreter that runs Snakemake, unless a conda environment puts its own in front. Their idle
# threads sleep: a spinning one would take the core of the thread it waits for.
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]),
    OMP_WAIT_POLICY="PASSIVE",
)

try:
    plan = Configuration(
        config, Path(workflow.basedir) / "workflow/schemas/config.schema.yaml"
    )
except UserError as error:
    raise WorkflowError(str(error))

os.environ.update(plan.hub_environment())

# With all benchmarks in one job, a job's outputs are those of every benchmark and its log is called "all".
ALL_IN_ONE = plan["benchmarks_per_job"] == "all"
JOB = "all" if ALL_IN_ONE else "{benchmark}"
JOB_BENCHMARKS = plan.benchmarks if ALL_IN_ONE else ["{benchmark}"]


def one_of(names):
    return "|".join(map(re.escape, names))


wildcard_constraints:
    gpu=one_of([plan["gpu"]]),
    dataset=one_of([plan["prompts"]["dataset"]]),
    target=one_of(plan["targets"]),
    host=one_of(plan["hosts"]),
    setting=one_of(plan.settings),
    draft="released|published|trained|control",
    benchmark=one_of(plan.benchmarks),


# How a module is started ---------------------------------------------------------------------------------------------


def launch(wildcards, resources):
    """One process, or one for each GPU of the job, which the profile may spread over several nodes."""
    gpus = resources.gpu // resources.nodes
    return f"python -m dloop.launch --nodes {resources.nodes} --gpus-per-node {gpus} --"


def target_env(wildcards):
    return f"../envs/{plan['targets'][wildcards.target]['environment']}.yaml"


def regeneration_env(wildcards):
    on_servers = plan["regenerate"]["servers"] or plan["regenerate"]["launch_servers"]
    return "../envs/sglang.yaml" if on_servers else target_env(wildcards)


# Inputs: only what a rule makes; repositories and folders of somebody else are flags ---------------------------------


def made_here(path):
    return [path] if path.startswith("results/") else []


def target_inputs(wildcards):
    return made_here(plan["targets"][wildcards.target]["model"])


def prompts_file():
    return f"results/prompts/{plan['prompts']['dataset']}.jsonl"


def prompt_inputs(wildcards):
    return made_here(plan["prompts"].get("flags", {}).get("data_path", ""))


def released_inputs(wildcards):
    return made_here(plan.draft_source(wildcards.target, wildcards.host, "released"))


def start_inputs(wildcards):
    """The released draft a training starts from; a released draft itself is trained from scratch."""
    return [] if wildcards.draft == "released" else released_inputs(wildcards)


def draft_inputs(wildcards):
    return made_here(
        plan.draft_source(wildcards.target, wildcards.host, wildcards.draft)
    )


def cost_tables():
    wanted = plan.pairs if plan.has_cost_tables else []
    return [
        f"results/costs/{plan['gpu']}/{target}/{host}.json" for target, host in wanted
    ]


def dataset_inputs(wildcards):
    return [path for dataset in datasets(wildcards) for path in made_here(dataset)]


# Flags: functions of the wildcards alone, so that Snakemake tracks every value that changes a number ------------------


def regeneration_flags(wildcards):
    return command_line(plan.regeneration_flags(wildcards.target))


def servers(wildcards, resources):
    """Who answers does not change the answers; asking for `resources` keeps Snakemake from tracking it."""
    given = plan["regenerate"]
    if given["launch_servers"]:
        own = (
            {"server_command": given["server_command"]}
            if "server_command" in given
            else {}
        )
        return command_line({"launch_servers": max(1, resources.gpu), **own})
    return f"--server-address {' '.join(given['servers'])}" if given["servers"] else ""


def training_flags(wildcards):
    return command_line(
        plan.training_flags(wildcards.target, wildcards.host, wildcards.draft)
    )


def cost_flags(wildcards):
    return command_line(plan.cost_flags(wildcards.target, wildcards.host))


def baseline_flags(wildcards):
    return command_line(plan.baseline_flags(wildcards.target))


def evaluation_flags(wildcards):
    return command_line(
        plan.evaluation_flags(
            wildcards.target, wildcards.host, wildcards.setting, wildcards.draft
        )
    )


def datasets(wildcards):
    """What `--dataset` is given, in the order of the job's outputs."""
    names = plan.benchmarks if ALL_IN_ONE else [wildcards.benchmark]
    return [plan.dataset(name) for name in names]


# What the targets ask for --------------------------------------------------------------------------------------------


def baseline_files():
    targets = {target: None for target, _ in plan.pairs}
    return expand(
        "results/baseline/{gpu}/{target}/{benchmark}.json",
        gpu=plan["gpu"],
        target=targets,
        benchmark=plan.benchmarks,
    )


def evaluation_files():
    return [
        f"results/eval/{plan['gpu']}/{row.target}/{row.host}/{row.setting}/{row.draft}/{benchmark}.json"
        for row in plan.experiments
        for benchmark in plan.benchmarks
    ]


def training_files():
    return [
        f"{plan.training_folder(*draft)}/manifest.json"
        for draft in plan.trained_drafts()
    ]


def table_files():
    return expand(rules.tables.output, gpu=plan["gpu"])
