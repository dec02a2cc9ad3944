"""The gate sweep: predictions against real decoding at three thresholds, grouping, refusals, no torch."""

import random
import subprocess
import sys

import pandas as pd
import pytest
import torch

from dloop import gate_sweep
from dloop.cli import UserError
from dloop.data.benchmarks import Prompt
from dloop.decoding.clock import Clock
from dloop.decoding.evaluation import Evaluator
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, SilentDrafter, generate
from dloop.decoding.target import Target
from dloop.hosts.host import Segment
from dloop.hosts.target_model import load_target
from dloop.results.metrics import summarise
from dloop.results.record import write_result
from tests.reporting.tree import cost_table
from tests.results.fabricate import CONFIG, invented, result

PROMPTS = [[5, 6, 7], [90, 3, 14, 15], [33, 44]]
LIMIT = 160
GATES = {-2.0: "recorded", -0.9: "strict", -0.5: "stricter", 1.0: "closed"}


class SteadyDrafter:
    """Knows what the target will say but for fixed places, near which it is unsure: the same ones at every gate."""

    stage_length = 6

    def __init__(self, answers):
        self.answers = answers

    def reset(self, capacity):
        self.place = None

    def begin(self, features, tokens):
        if self.place is None:
            self.text = next(text for ids, text in zip(PROMPTS, self.answers, strict=True) if ids[1:] == tokens[:-1])
            self.doubts = [random.Random(f"{self.text[0]}/{spot}").random() for spot in range(2 * LIMIT)]
            self.place = 0
        else:
            self.place += len(tokens)
        self.drafted = self.place

    def _stage(self):
        spots = range(self.drafted + 1, self.drafted + 1 + self.stage_length)
        self.drafted += self.stage_length
        right = [self.text[spot] if spot < len(self.text) else 0 for spot in spots]
        wrong = [self.doubts[spot] < 0.12 for spot in spots]
        chain = [token ^ bad for token, bad in zip(right, wrong, strict=True)]
        return Segment(chain, [-0.2 * self.doubts[spot] - 0.8 * bad for spot, bad in zip(spots, wrong, strict=True)])

    first_stage = next_stage = _stage

    def end(self):
        pass


@pytest.fixture(scope="module")
def decoded(golden, tmp_path_factory):
    """Result files of one scripted draft, really decoded at several gates on a tiny target, and their baseline."""
    root = tmp_path_factory.mktemp("gates")
    target = Target(load_target(str(golden / "dflash/target"), dtype=torch.float32, device=torch.device("cpu")))
    plain = Settings(2 * LIMIT, frozenset())
    answers = [generate(target, SilentDrafter(), ids, plain, Clock(target.device)).output_ids for ids in PROMPTS]

    def measured(drafter, gate, drafts):
        settings = Settings(LIMIT, frozenset(), Gate(gate))
        evaluator = Evaluator(target, drafter, settings, tokenizer=None, drafts=drafts)
        prompts = [Prompt(row, turns=None, prompt_ids=ids) for row, ids in enumerate(PROMPTS)]
        return [answer.record for index, prompt in enumerate(prompts) for answer in evaluator.answers(index, prompt)]

    def store(name, records, **changes):
        config = {**CONFIG, "max_new_tokens": LIMIT, **changes.pop("config", {})}
        write_result(root / f"{name}.json", result(records, config=config, summary=summarise(records), **changes))

    store("baseline", measured(SilentDrafter(), 1.0, drafts=False), kind="baseline", host=None)
    for gate, name in GATES.items():
        config = {"draft_model": "drafts/steady", "loop_gate": gate}
        store(name, measured(SteadyDrafter(answers), gate, drafts=True), config=config)
    target.close()
    return root


def sweep(folder, *names, more=()):
    gate_sweep.main([*(str(folder / f"{name}.json") for name in names), *map(str, more)])


def test_predictions_agree_with_real_runs_at_three_gates(decoded, tmp_path, capsys):
    sweep(decoded, *GATES.values(), "baseline", more=["--gates", -0.9, -0.5, "--output", tmp_path / "g.csv"])
    frame = pd.read_csv(tmp_path / "g.csv").set_index("threshold")
    assert list(frame.index) == list(GATES)
    assert frame.tau[-2.0] == pytest.approx(frame.measured_tau[-2.0])
    for gate in (-0.9, -0.5, 1.0):
        assert frame.tau[gate] == pytest.approx(frame.measured_tau[gate], rel=0.05)
    assert frame.measured_tau[-2.0] > 1.1 * frame.measured_tau[1.0], "the gates must differ for this to mean anything"
    assert frame.speedup[-2.0] == pytest.approx(frame.measured_speedup[-2.0])
    assert "--loop-gate" in capsys.readouterr().out


def test_without_a_baseline_only_the_gain_is_known(decoded, tmp_path, capsys):
    costs = cost_table(tmp_path / "c.json")
    sweep(decoded, "recorded", more=["--output", tmp_path / "g.csv", "--cost-table", costs])
    frame = pd.read_csv(tmp_path / "g.csv").set_index("threshold")
    assert frame.speedup.isna().all()
    assert frame.gain[1.0] == 0
    assert frame.gain.idxmax() == -1.0
    assert frame.gain[-2.0] < 0, "many stages for nothing cost more than they yield"
    out = capsys.readouterr().out
    assert "Gates below -2 would draft stages that were never drafted" in out
    assert "--loop-gate -1 (τ " in out


def test_a_gate_below_the_recorded_one_is_refused(decoded):
    with pytest.raises(UserError, match=r"--gates asks for -3, but .* was recorded at -2"):
        sweep(decoded, "recorded", more=["--gates", "-3"])


def test_results_without_a_loop_are_refused(decoded):
    with pytest.raises(UserError, match="no result of a looped run"):
        sweep(decoded, "closed", "baseline")


def test_two_results_of_one_gate_and_benchmark_are_refused(decoded):
    with pytest.raises(UserError, match=r"recorded\.json is the second result of gsm8k at one gate"):
        sweep(decoded, "recorded", "recorded")


def test_every_draft_has_its_table_and_benchmarks_are_averaged(tmp_path, capsys):
    for host in ("dflash", "dspark"):
        for name in ("gsm8k", "mbpp"):
            made = invented(name, host=host, openness=0.3, config={"loop_gate": -1.0, "draft_model": host})
            write_result(tmp_path / f"{host}-{name}.json", made)
    sweep(tmp_path, *(f"{host}-{name}" for host in ("dflash", "dspark") for name in ("gsm8k", "mbpp")))
    out = capsys.readouterr().out
    assert out.count("mean of 2 benchmarks") == 2
    assert len([line for line in out.splitlines() if line.startswith(("DFlash on", "DSpark on"))]) == 4


def test_a_sweep_never_imports_torch(decoded):
    code = "import sys\nfrom dloop import gate_sweep\ngate_sweep.main(sys.argv[1:])\nsys.exit('torch' in sys.modules)"
    files = [str(decoded / f"{name}.json") for name in ("recorded", "baseline")]
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
