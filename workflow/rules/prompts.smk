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
        flags=command_line(plan.prompt_flags()),
    message:
        "Prompts: {wildcards.dataset} (log: {log})"
    shell:
        "python -m dloop.prompts {params.flags} --output {output} > {log} 2>&1"
