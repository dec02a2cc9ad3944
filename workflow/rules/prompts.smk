# The questions of the training data, from the hub or a local file.


rule prompts:
    input:
        prompt_inputs,
    output:
        ensure("results/prompts/{dataset}.jsonl", non_empty=True),
    log:
        "logs/prompts/{dataset}.log",
    benchmark:
        "logs/prompts/{dataset}.usage.jsonl"
    conda:
        "../envs/core.yaml"
    resources:
        runtime=240,
    params:
        flags=command_line(plan["prompts"].get("flags", {})),
    shell:
        "python -m dloop.prompts --dataset {wildcards.dataset} --output-file {output} {params.flags} > {log} 2>&1"
