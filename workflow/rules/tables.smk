# Tables and plots, from result files alone.

TABLES = [*plan["hosts"], "overview"]


rule tables:
    input:
        results=baseline_files() + evaluation_files(),
        cost=cost_table_inputs(),
    output:
        tables=expand(
            "results/tables/{{gpu}}/{table}.{kind}",
            table=TABLES,
            kind=["csv", "md", "tex"],
        ),
        plots=expand(
            "results/plots/{{gpu}}/{plot}.{kind}",
            plot=["acceptance", "extra_stages"],
            kind=["svg", "png"],
        ),
    log:
        "logs/tables/{gpu}.log",
    benchmark:
        "logs/tables/{gpu}.usage.jsonl"
    conda:
        "../envs/core.yaml"
    resources:
        runtime=30,
    params:
        experiments=json.dumps([row.as_json() for row in plan.experiments]),
        benchmarks=plan.benchmarks,
        folders=lambda wildcards, output: (
            Path(output.tables[0]).parent,
            Path(output.plots[0]).parent,
        ),
        flags=command_line(plan["tables"]),
    shell:
        "python -m dloop.tables --results results --gpu {wildcards.gpu} --experiments {params.experiments:q}"
        " --benchmarks {params.benchmarks} --output {params.folders[0]} --plots {params.folders[1]}"
        " {params.flags} > {log} 2>&1"
