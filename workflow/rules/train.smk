# Drafts trained here: loop-aware ones, their controls, and, where none is published, the released draft itself.
# The folder of a training is no output: Snakemake deletes outputs before a job and after a failure, and the checkpoints
# on the way must outlive both. The outputs are written once, at the end.


rule train:
    input:
        data=ancient("results/regen/{target}/train.jsonl"),
        # New answers retrain, a mere touch of the big file does not: small files are compared by content.
        stats="results/regen/{target}/stats.json",
        target=target_inputs,
        start=start_inputs,
    output:
        manifest="results/train/{target}/{host}/{draft}/manifest.json",
        final=directory("results/train/{target}/{host}/{draft}/final"),
    log:
        "logs/train/{target}/{host}/{draft}.log",
    benchmark:
        "logs/train/{target}/{host}/{draft}.usage.jsonl"
    conda:
        target_env
    threads: plan["threads"]["shared"]
    resources:
        nodes=1,
        gpu=plan["gpus_per_job"],
    params:
        launch=launch,
        flags=training_flags,
        folder=lambda wildcards, output: Path(output.manifest).parent,
    message:
        "Training the {wildcards.draft} draft of {wildcards.host} for {wildcards.target} (log: {log})"
    shell:
        "{params.launch} dloop.train --train-data-path {input.data} {params.flags}"
        " --output-dir {params.folder} --on-config-change move-aside > {log} 2>&1"
