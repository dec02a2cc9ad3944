"""A folder of invented results, laid out as the workflow does, with the experiments that describe it."""

import json
from pathlib import Path

from dloop.results.atomic import write_json
from tests.results.fabricate import BLOCK, CONFIG, ROW, STAGE, STEP, compare, invented, write

BENCHMARKS = ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca"]
EASE = dict(zip(BENCHMARKS, (0.71, 0.73, 0.84, 0.83, 0.85, 0.9, 0.86, 0.78), strict=True))
"""How readily the target accepts a draft token of each benchmark."""

ROWS = {
    ("released", "released"): {"skill": 0.0, "openness": 0.0, "gate": 1.0},
    ("dloop", "trained"): {"skill": 0.01, "openness": 0.12, "gate": -0.5},
    ("dloop", "control"): {"skill": 0.03, "openness": 0.08, "gate": -0.5},
}
"""By setting and draft: what it adds to a benchmark's ease, how often its gate opens, and at what threshold."""


def build(root: Path, *, targets=("tiny",), host="dflash", rows=ROWS, benchmarks=BENCHMARKS, gpu="cpu", **how):
    """Write baselines and evaluations below `root`; returns the experiments. `how` goes to every result."""
    for target in targets:
        model = {"model": f"models/{target}"}
        for name in benchmarks:
            turns = 2 if name == "mt-bench" else 1
            plain = {key: value for key, value in how.items() if key != "ties"}
            baseline = invented(name, turns=turns, config=model, seed=target, **plain)
            path = write(root, f"baseline/{gpu}/{target}/{name}.json", baseline)
            for (setting, draft), row in rows.items():
                made = invented(
                    name,
                    host=host,
                    turns=turns,
                    skill=EASE.get(name, 0.8) + row["skill"],
                    openness=row["openness"] * (2 if name in ("livecodebench", "mt-bench") else 0.8),
                    config={**model, "loop_gate": row["gate"]},
                    seed=f"{target}/{setting}/{draft}",
                    **how,
                )
                place = f"eval/{gpu}/{target}/{host}/{setting}/{draft}/{name}.json"
                write(root, place, compare(made, baseline, str(path)))
    return experiments(targets, host, rows)


def experiments(targets=("tiny",), host="dflash", rows=ROWS):
    """The experiments as the workflow describes them to `dloop.tables`."""
    return [
        {
            "target": target,
            "host": host,
            "setting": setting,
            "draft": draft,
            "flags": {
                "model": f"models/{target}",
                "max_new_tokens": CONFIG["max_new_tokens"],
                "dtype": "float32",
                "loop_gate": row["gate"],
            },
        }
        for target in targets
        for (setting, draft), row in rows.items()
    ]


def cost_table(path: Path, *, rows=64, **env) -> Path:
    """The cost table that the invented times follow."""
    verify = {str(n): STEP + ROW * (n - 1) for n in (1, BLOCK + 1, 2 * BLOCK + 1, rows)}
    env = {"gpu": "CPU: Model 7", "dtype": "float32", **env}
    stages = {"first": STAGE, "next": STAGE}
    timed = {"verify_seconds": verify, "draft_stage_seconds": stages, "env": env}
    write_json(path, {"model": "models/tiny", "host": "dflash", **timed})
    return path


def arguments(root: Path, listed, *more, benchmarks=BENCHMARKS) -> list[str]:
    """A command line of `dloop.tables` on such a folder."""
    return [
        *("--results", str(root), "--gpu", "cpu", "--experiments", json.dumps(listed)),
        *("--output", str(root / "tables" / "cpu"), "--plots", str(root / "plots" / "cpu")),
        *("--benchmarks", *benchmarks, *more),
    ]
