# The target's own answers to the prompts: shards that can fail one by one, then a merge that loses nothing.


scattergather:
    regenerate=plan["regenerate"]["shards"],


localrules:
    merge,


rule regenerate:
    input:
        prompts=f"results/prompts/{plan['prompts']['dataset']}.jsonl",
        target=target_inputs,
    output:
        temp("results/regen/{target}/shards/{scatteritem}.jsonl"),
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
    shell:
        "python -m dloop.regenerate --input-file-path {input.prompts} --output-file-path {output}"
        " --shard {wildcards.scatteritem} {params.servers} {params.flags} > {log} 2>&1"


rule merge:
    input:
        gather.regenerate("results/regen/{{target}}/shards/{scatteritem}.jsonl"),
    output:
        data=ensure("results/regen/{target}/train.jsonl", non_empty=True),
        stats="results/regen/{target}/stats.json",
    log:
        "logs/merge/{target}.log",
    benchmark:
        "logs/merge/{target}.usage.jsonl"
    conda:
        regeneration_env
    resources:
        runtime=60,
    shell:
        "python -m dloop.regenerate --merge {input} --output-file-path {output.data} > {log} 2>&1"
