# What the embedded default has instead of the hub: a corpus, a tokenizer and small targets, all made here.


rule corpus:
    output:
        training="results/demo/corpus/target_train.jsonl",
        heldout="results/demo/corpus/heldout.jsonl",
        prompts="results/demo/corpus/prompts.jsonl",
        benchmarks=expand(
            "results/demo/corpus/benchmarks/{name}.jsonl", name=plan.benchmarks
        ),
    log:
        "logs/corpus/demo.log",
    benchmark:
        "logs/corpus/demo.usage.jsonl"
    conda:
        "../envs/core.yaml"
    resources:
        runtime=10,
    params:
        folder=lambda wildcards, output: Path(output.training).parent,
        flags=command_line(plan["demo"]["corpus"]),
    message:
        "Writing the demo's conversations (log: {log})"
    shell:
        "python -m dloop.demo.corpus --output-dir {params.folder} {params.flags} > {log} 2>&1"


rule tokenizer:
    input:
        rules.corpus.output.training,
    output:
        directory("results/demo/tokenizer"),
    log:
        "logs/tokenizer/demo.log",
    benchmark:
        "logs/tokenizer/demo.usage.jsonl"
    conda:
        "../envs/core.yaml"
    resources:
        runtime=10,
    params:
        flags=command_line(plan["demo"]["tokenizer"]),
    message:
        "Training the demo's tokenizer (log: {log})"
    shell:
        "python -m dloop.demo.tokenizer --corpus {input} --output-dir {output} {params.flags} > {log} 2>&1"


rule tiny_target:
    input:
        corpus=rules.corpus.output.training,
        heldout=rules.corpus.output.heldout,
        tokenizer=rules.tokenizer.output,
    output:
        directory("results/demo/targets/{target}"),
    log:
        "logs/tiny_target/{target}.log",
    benchmark:
        "logs/tiny_target/{target}.usage.jsonl"
    conda:
        target_env
    threads: plan["threads"]["shared"]
    resources:
        runtime=60,
    params:
        flags=lambda wildcards: command_line(plan["demo"]["targets"][wildcards.target]),
    message:
        "Training the demo's target {wildcards.target} (log: {log})"
    shell:
        "python -m dloop.demo.tiny_target --corpus {input.corpus} --heldout {input.heldout}"
        " --tokenizer {input.tokenizer} --output-dir {output} {params.flags} > {log} 2>&1"
