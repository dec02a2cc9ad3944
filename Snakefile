# From prompts to tables: run from the repository root, for example
#
#     snakemake --cores 2 --configfile config/demo.yaml     the embedded default, on two CPU cores
#     snakemake --profile slurm all_tables                  the paper's tables, on a cluster
#
# What runs is decided by the configuration (config/README.md), how it runs by the profile (slurm/README.md).
from snakemake.utils import min_version

min_version("9.27")


if not workflow.configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/prompts.smk"
include: "workflow/rules/regenerate.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/tables.smk"


if "demo" in config:

    include: "workflow/rules/demo.smk"


localrules:
    all_tables,
    all_baselines,
    all_training,


rule all_tables:
    default_target: True
    input:
        table_files(),


rule all_baselines:
    input:
        baseline_files(),


rule all_training:
    input:
        training_files(),


onsuccess:
    shown = Path(f"logs/tables/{plan['gpu']}.log")
    if shown.exists() and shown.stat().st_mtime > workflow.start_time.timestamp():
        print(shown.read_text())
