"""Kills every stage at random moments, lets the same command finish, and compares with a run nobody disturbed.

    python -m tests.kill_stages --kills 20

The stages run as forks of this process, which imports what they need once; a moment is drawn evenly from the time the
undisturbed run took, so that loading, working and writing are all hit.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

ROWS = 48
CLOCKED = ("ttft", "draft_prefill_time", "decode_time", "tpot", "stage_times")
IMPORTED = [f"dloop.{stage}" for stage in ("prompts", "regenerate", "train", "benchmark", "tables")]
IMPORTED += ["matplotlib.pyplot", "pandas", "datasets"]


@dataclass(frozen=True)
class Stage:
    """A command, given the folder it writes to, and what of that folder must not depend on kills."""

    name: str
    module: str
    arguments: Callable[[Path], list[object]]
    outcome: Callable[[Path], object]


def start(stage: Stage, folder: Path) -> int:
    """Process id of the stage, running in a fork; its output goes to a file beside the folder."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = [stage.module, *map(str, stage.arguments(folder))]
        import_module("dloop.cli").run(import_module(stage.module).main)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def finish(stage: Stage, folder: Path) -> object:
    """Run the stage to its end; what it leaves."""
    _, status = os.waitpid(start(stage, folder), 0)
    assert status == 0, folder.with_suffix(".log").read_text()
    return stage.outcome(folder)


def kill_after(stage: Stage, folder: Path, seconds: float) -> bool:
    """Run the stage and kill it after so many seconds; False if it was faster."""
    pid = start(stage, folder)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def trial(stage: Stage, world: Path, kills: int, moments: random.Random) -> str:
    """Kill the stage so often, each time in a fresh folder; a sentence about it. Fails where an outcome differs."""
    began = time.monotonic()
    calm = finish(stage, world / f"{stage.name}_calm")
    duration, hit, tried = time.monotonic() - began, 0, 0
    while hit < kills:
        folder = world / f"{stage.name}_{tried}"
        hit += kill_after(stage, folder, moments.uniform(0, duration))
        assert finish(stage, folder) == calm, f"{stage.name}: trial {tried} changed the outcome, see {folder}"
        shutil.rmtree(folder, ignore_errors=True)
        tried += 1
        assert tried <= 10 * kills, f"{stage.name} ended before nearly every kill; it does too little to be tested"
    return f"{stage.name}: {duration:.1f} s undisturbed, killed {hit} times in {tried} trials, every outcome the same"


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def responses(path: Path) -> list[dict]:
    """Responses of a result without what a clock wrote."""
    found = json.loads(path.read_text())["responses"]
    return [{key: value for key, value in response.items() if key not in CLOCKED} for response in found]


def files(folder: Path, *patterns: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for pattern in patterns for path in sorted(folder.rglob(pattern))}


def answers(folder: Path) -> list[dict]:
    """Rows of the three files, by line; none twice."""
    rows = [row for path in folder.glob("out*.jsonl") for row in read_rows(path)]
    assert len({row["line"] for row in rows}) == len(rows) == ROWS
    return sorted(rows, key=lambda row: row["line"])


def stages(world: Path) -> list[Stage]:
    """Every stage on tiny models, each with inputs that nobody kills."""
    from tests.reporting.tree import build
    from tests.training.tiny import write_conversations, write_draft_config, write_target

    target, source = write_target(world / "target"), write_conversations(world / "source.jsonl", ROWS)
    config = write_draft_config(world / "draft.json")
    questions = []
    for number in range(3):
        questions.append(world / f"questions_{number}.jsonl")
        questions[-1].write_text("".join(json.dumps({"turns": [f"Say {n} pears."]}) + "\n" for n in range(3)))
    experiments = json.dumps(build(world / "results", benchmarks=["gsm8k", "mt-bench"]))
    on_cpu = ["--device", "cpu", "--dtype", "float32"]
    training = ["--train-data-path", source, "--target-model-path", target, "--draft-config", config, *on_cpu]
    training += ["--batch-size", 2, "--max-length", 64, "--num-anchors", 4, "--dataloader-num-workers", 0]
    return [
        Stage(
            "prompts",
            "dloop.prompts",
            lambda folder: ["--data-path", source, "--output", folder / "prompts.jsonl"],
            lambda folder: files(folder, "prompts.jsonl"),
        ),
        Stage(
            "regenerate",
            "dloop.regenerate",
            lambda folder: [
                *("--model", target, "--input-file-path", source, "--output-file-path", folder / "out.jsonl"),
                *("--max-tokens", 24, "--batch-size", 4, "--resume", *on_cpu),
            ],
            answers,
        ),
        Stage(
            "train",
            "dloop.train",
            lambda folder: [*training, "--output-dir", folder, "--save-interval", 3],
            lambda folder: files(folder / "final", "*"),
        ),
        Stage(
            "benchmark",
            "dloop.benchmark",
            lambda folder: [
                *("--model", target, "--baseline", "--dataset", *questions, "--warmup-runs", 0, *on_cpu),
                *("--max-new-tokens", 24, "--output", *(folder / f"{path.stem}.json" for path in questions)),
            ],
            lambda folder: [responses(folder / f"{path.stem}.json") for path in questions],
        ),
        Stage(
            "tables",
            "dloop.tables",
            lambda folder: [
                *("--results", world / "results", "--gpu", "cpu", "--experiments", experiments),
                *("--benchmarks", "gsm8k", "mt-bench", "--output", folder / "tables", "--plots", folder / "plots"),
            ],
            lambda folder: files(folder, "*.csv", "*.md", "*.tex", "*.svg"),
        ),
    ]


def import_once() -> None:
    """What the forks would otherwise import each time; no thread may start here."""
    import torch

    torch.set_num_threads(1)
    for name in IMPORTED:
        import_module(name)
    for name in ("AutoModelForCausalLM", "AutoTokenizer", "Qwen3ForCausalLM"):
        getattr(import_module("transformers"), name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill every stage at random moments and compare its outcome.")
    parser.add_argument("--kills", type=int, default=20, help="for each stage")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import_once()
    with TemporaryDirectory() as folder:
        for stage in stages(Path(folder)):
            moments = random.Random(f"{options.seed}/{stage.name}")
            print(trial(stage, Path(folder), options.kills, moments), flush=True)


if __name__ == "__main__":
    main()
