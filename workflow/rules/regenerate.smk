# The target's own answers to the prompts: shards that can fail one by one, then a merge that loses nothing.
# A shard grows in a folder that is no output, because Snakemake deletes outputs before a job and after a failure, and an
# interrupted shard must go on where it was.


scattergather:
    regenerate=plan["regenerate"]["shards"],


localrules:
    merge,


rule regenerate:
    input:
        prompts=prompts_file(),
        target=target_inputs,
    output:
        answers=temp("results/regen/{target}/shards/{scatteritem}.jsonl"),
        errors=temp("results/regen/{target}/shards/{scatteritem}_error.jsonl"),
        skipped=temp("results/regen/{target}/shards/{scatteritem}_skipped.jsonl"),
    log:
        "logs/regenerate/{target}/{scatteritem}.log",
    benchmark:
        "logs/regenerate/{target}/{scatteritem}.usage.jsonl"
    conda:
        regeneration_env
    threads: plan["threads"]["shared"]
    resources:
        gpu=min(1, plan["gpus_per_job"]),
    params:
        flags=regeneration_flags,
        servers=servers,
        growing="results/regen/{target}/growing/{scatteritem}",
        finished="results/regen/{target}/shards",
    message:
        "{wildcards.target} answers the prompts, shard {wildcards.scatteritem} (log: {log})"
    shell:
        "python -m dloop.regenerate --input-file-path {input.prompts} --shard {wildcards.scatteritem}"
        " {params.servers} {params.flags} --output-file-path {params.growing}.jsonl --resume --overwrite"
        " > {log} 2>&1 && mv {params.growing}{{,_error,_skipped}}.jsonl {params.finished}"


rule merge:
    input:
        prompts=prompts_file(),
        shards=gather.regenerate("results/regen/{{target}}/shards/{scatteritem}.jsonl"),
        errors=gather.regenerate(
            "results/regen/{{target}}/shards/{scatteritem}_error.jsonl"
        ),
        skipped=gather.regenerate(
            "results/regen/{{target}}/shards/{scatteritem}_skipped.jsonl"
        ),
    output:
        data=ensure("results/regen/{target}/train.jsonl", non_empty=True),
        errors="results/regen/{target}/train_error.jsonl",
        skipped="results/regen/{target}/train_skipped.jsonl",
        stats="results/regen/{target}/stats.json",
    log:
        "logs/merge/{target}.log",
    benchmark:
        "logs/merge/{target}.usage.jsonl"
    conda:
        regeneration_env
    resources:
        runtime=60,
    message:
        "Joining the answers of {wildcards.target} (log: {log})"
    shell:
        "python -m dloop.regenerate --merge {input.shards} --input-file-path {input.prompts}"
        " --output-file-path {output.data} --stats {output.stats} > {log} 2>&1"
