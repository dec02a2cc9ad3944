# Decoding of the benchmarks: the autoregressive baseline of a target once, then every draft under every setting.
# Both are timed, so nothing may run beside them: `threads` keeps everything else off a CPU, the `gpu` resource off the
# GPUs. Each process has one thread, because several would wait for each other at batch 1.


localrules:
    conditions,


# Snakemake looks at nothing but `ancient` inputs' existence, and does not look at the parameters of a job at all while a
# job before it is planned. A changed length or precision therefore reaches evaluations through this small file.
rule conditions:
    output:
        "results/baseline/{gpu}/{target}/conditions.txt",
    log:
        "logs/conditions/{gpu}/{target}.log",
    benchmark:
        "logs/conditions/{gpu}/{target}.usage.jsonl"
    conda:
        target_env
    resources:
        runtime=5,
    params:
        flags=baseline_flags,
    message:
        "Noting what every result of {wildcards.target} has in common"
    shell:
        "echo {params.flags:q} > {output} 2> {log}"


rule baseline:
    input:
        target=target_inputs,
        datasets=dataset_inputs,
    output:
        expand(
            "results/baseline/{{gpu}}/{{target}}/{benchmark}.json",
            benchmark=JOB_BENCHMARKS,
        ),
    log:
        f"logs/baseline/{{gpu}}/{{target}}/{JOB}.log",
    benchmark:
        f"logs/baseline/{{gpu}}/{{target}}/{JOB}.usage.jsonl"
    conda:
        target_env
    threads: plan["threads"]["alone"]
    resources:
        nodes=1,
        gpu=plan["gpus_per_job"],
    params:
        launch=launch,
        datasets=datasets,
        flags=baseline_flags,
    message:
        "Measuring {wildcards.target} without a draft (log: {log})"
    shell:
        "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 {params.launch} dloop.benchmark --baseline {params.flags} --dataset {params.datasets}"
        " --expect-device {wildcards.gpu} --output {output} > {log} 2>&1"


rule evaluate:
    input:
        target=target_inputs,
        draft=draft_inputs,
        datasets=dataset_inputs,
        conditions="results/baseline/{gpu}/{target}/conditions.txt",
        # A baseline measured again makes no evaluation stale: the tables compute every speedup from both files.
        baseline=ancient(
            expand(
                "results/baseline/{{gpu}}/{{target}}/{benchmark}.json",
                benchmark=JOB_BENCHMARKS,
            )
        ),
    output:
        expand(
            "results/eval/{{gpu}}/{{target}}/{{host}}/{{setting}}/{{draft}}/{benchmark}.json",
            benchmark=JOB_BENCHMARKS,
        ),
    log:
        f"logs/evaluate/{{gpu}}/{{target}}/{{host}}/{{setting}}/{{draft}}/{JOB}.log",
    benchmark:
        f"logs/evaluate/{{gpu}}/{{target}}/{{host}}/{{setting}}/{{draft}}/{JOB}.usage.jsonl"
    conda:
        target_env
    threads: plan["threads"]["alone"]
    resources:
        nodes=1,
        gpu=plan["gpus_per_job"],
    params:
        launch=launch,
        datasets=datasets,
        flags=evaluation_flags,
    message:
        "Measuring {wildcards.target} with {wildcards.host}, {wildcards.setting}, {wildcards.draft} draft (log: {log})"
    shell:
        "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 {params.launch} dloop.benchmark {params.flags} --dataset {params.datasets}"
        " --baseline-result {input.baseline} --expect-device {wildcards.gpu} --output {output} > {log} 2>&1"


# A few parts of a round, timed once for a target and a host: for the modelled speedup beside the measured one.
rule cost_table:
    input:
        target=target_inputs,
        draft=released_inputs,
    output:
        "results/costs/{gpu}/{target}/{host}.json",
    log:
        "logs/cost_table/{gpu}/{target}/{host}.log",
    benchmark:
        "logs/cost_table/{gpu}/{target}/{host}.usage.jsonl"
    conda:
        target_env
    threads: plan["threads"]["alone"]
    resources:
        gpu=min(1, plan["gpus_per_job"]),
    params:
        flags=cost_flags,
    message:
        "Timing the parts of a round of {wildcards.target} with {wildcards.host} (log: {log})"
    shell:
        "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python -m dloop.cost_table {params.flags} --output {output} > {log} 2>&1"
