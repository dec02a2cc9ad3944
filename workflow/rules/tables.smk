# Tables, plots and one page with all of them, from result files alone.


report: "../report/workflow.rst"


TABLES = [*plan["hosts"], "overview"]
PLOTS = ["speedup", "acceptance_length", "extra_stages", "round_time", "gate"]


localrules:
    tables,


rule tables:
    input:
        results=baseline_files() + evaluation_files(),
        costs=cost_tables(),
    output:
        page=report(
            "results/tables/{gpu}/report.html",
            caption="../report/page.rst",
            category="Everything on one page",
        ),
        numbers=report(
            expand("results/tables/{{gpu}}/{table}.csv", table=[*TABLES, "audit"]),
            caption="../report/tables.rst",
            category="Tables",
        ),
        pages=expand(
            "results/tables/{{gpu}}/{table}.{kind}", table=TABLES, kind=["md", "tex"]
        ),
        audit="results/tables/{gpu}/audit.md",
        plots=report(
            expand("results/plots/{{gpu}}/{plot}.svg", plot=PLOTS),
            caption="../report/plots.rst",
            category="Plots",
        ),
        pictures=expand("results/plots/{{gpu}}/{plot}.png", plot=PLOTS),
    log:
        "logs/tables/{gpu}.log",
    benchmark:
        "logs/tables/{gpu}.usage.jsonl"
    conda:
        "../envs/core.yaml"
    resources:
        runtime=30,
    params:
        experiments=json.dumps([vars(row) for row in plan.experiments]),
        benchmarks=plan.benchmarks,
        tables=lambda wildcards: f"results/tables/{wildcards.gpu}",
        plots=lambda wildcards: f"results/plots/{wildcards.gpu}",
        flags=command_line(plan.table_flags()),
        costs=lambda wildcards, input: (
            f"--cost-table {input.costs}" if input.costs else ""
        ),
    message:
        "Tables and plots of {wildcards.gpu} (log: {log})"
    shell:
        "python -m dloop.tables --results results --gpu {wildcards.gpu} --experiments {params.experiments:q}"
        " --benchmarks {params.benchmarks} --output {params.tables} --plots {params.plots}"
        " {params.costs} {params.flags} > {log} 2>&1"
