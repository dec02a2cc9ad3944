"""Which change reruns what: the workflow is run once with stages that only write their outputs."""

import copy

import pytest

import dloop

BENCHMARK = """
import sys
from pathlib import Path

words = sys.argv[1:]
files = words[words.index("--output") + 1 :]
assert all(file.endswith(".json") for file in files), "the workflow's commands end with their outputs"
for file in files:
    Path(file).write_text("made")
"""

TABLES = """
import sys
from pathlib import Path

words = sys.argv[1:]
names = {"--output": [f"{table}.{kind}" for table in ("dflash", "overview") for kind in ("csv", "md", "tex")]}
names["--output"] += ["audit.csv", "audit.md", "report.html"]
plots = ("speedup", "acceptance_length", "extra_stages", "round_time", "gate")
names["--plots"] = [f"{plot}.{kind}" for plot in plots for kind in ("svg", "png")]
for option, files in names.items():
    for file in files:
        Path(words[words.index(option) + 1], file).write_text("made")
"""


def stub_stages(project):
    """A package in the project's folder whose stages only write files; everything else of it is the real one."""
    package = project.folder / "dloop"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__ = [{str(package)!r}, *{list(dloop.__path__)!r}]\n")
    (package / "benchmark.py").write_text(BENCHMARK)
    (package / "tables.py").write_text(TABLES)


@pytest.mark.slow
def test_a_change_reruns_what_depends_on_it_and_nothing_else(project):
    stub_stages(project)
    values = project.configuration()
    values["gpus_per_job"] = 0
    target, host = "qwen3-4b", values["hosts"]["dflash"]
    values["targets"] = {target: values["targets"][target]}
    values["hosts"] = {"dflash": host | {"drafts": {target: host["drafts"][target]}}}
    values["settings"] = {"dflash": {name: values["settings"]["dflash"][name] for name in ("released", "dloop")}}
    project.write(values)
    run = project.snakemake("--cores", "2", "all_tables")
    assert run.returncode == 0, run.stdout
    assert project.planned("all_tables") == {}, "a second run has nothing to do"

    def planned(change):
        changed = copy.deepcopy(values)
        change(changed)
        project.write(changed)
        return project.planned("all_tables")

    assert planned(lambda c: c.update(gpus_per_job=8, threads={"alone": 1, "shared": 1})) == {}, "mere resources"
    gate = planned(lambda c: c["settings"]["dflash"]["dloop"]["flags"].update(loop_gate=-0.75))
    assert gate == {"evaluate": 8, "tables": 1}
    limit = planned(lambda c: c["evaluation"].update(max_new_tokens=1024))
    assert limit == {"conditions": 1, "baseline": 8, "evaluate": 16, "tables": 1}
    eager = {"dloop-eager": {"draft": "loop", "flags": {"loop_gate": -1.0}}}
    row = planned(lambda c: c["settings"]["dflash"].update(eager))
    assert row == {"evaluate": 8, "tables": 1}
    column = planned(lambda c: c["benchmarks"].update(own={"file": "own.jsonl"}))
    assert column == {"baseline": 1, "evaluate": 2, "tables": 1}
    draft = planned(lambda c: c["hosts"]["dflash"]["drafts"]["qwen3-4b"].update(published="another/draft"))
    assert draft == {"evaluate": 8, "tables": 1}

    project.write(values)
    baseline = "results/baseline/h100-80gb/qwen3-4b/gsm8k.json"
    assert project.planned("--forcerun", baseline) == {"baseline": 1, "tables": 1}, "evaluations stay"
