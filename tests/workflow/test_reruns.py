"""Which change reruns what: the workflow is run once with stages that only write their outputs."""

import dloop

STAGE = """
import sys
from pathlib import Path

words = sys.argv[1:]
for option in ("--output", "--plots"):
    if option in words:
        start = words.index(option) + 1
        end = next((at for at in range(start, len(words)) if words[at].startswith("--")), len(words))
        for path in map(Path, words[start:end]):
            if path.suffix:
                path.write_text("made\\n")
            elif "tables" in path.parts:
                for name in TABLES:
                    (path / name).write_text("made\\n")
            else:
                for name in PLOTS:
                    (path / name).write_text("made\\n")
"""


def stub_stages(project):
    """A package in the project's folder whose stages write files; everything else of it is the real one."""
    package = project.folder / "dloop"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__ = [{str(package)!r}, *{list(dloop.__path__)!r}]\n")
    for stage in ("benchmark", "tables"):
        (package / f"{stage}.py").write_text(STAGE)


EVALUATION = "results/eval/h100-80gb/qwen3-4b/dflash"


def test_reruns(project):
    stub_stages(project)
    values = project.configuration()
    values["gpus_per_job"] = 0
    del values["targets"]["qwen3-8b"], values["hosts"]["dflash"]["drafts"]["qwen3-8b"]
    project.write(values)
    run = project.snakemake("--cores", "2", "all_tables")
    assert run.returncode == 0, run.stdout
    assert project.planned("all_tables") == {}, "a second run has nothing to do"

    values["settings"]["dflash"]["dloop"]["flags"]["loop_gate"] = -0.75
    project.write(values)
    assert project.planned("all_tables") == {"evaluate": 8, "tables": 1}
    listing = project.snakemake("all_tables", "--dry-run").stdout
    assert f"output: {EVALUATION}/released" not in listing
