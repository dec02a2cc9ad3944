import json
import subprocess
import sys

import pandas as pd
import pytest

from dloop import tables
from dloop.cli import UserError, parse
from tests.reporting.tree import BENCHMARKS, arguments, build, cost_table


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    listed = build(root, targets=("small", "large"), prompts=3)
    written = tables.make(parse(tables.Options, arguments(root, listed, "--note", "A note.")))
    return root, listed, written


def test_all_tables_and_pictures_are_written(made):
    root, _, written = made
    folder = root / "tables" / "cpu"
    assert {path.name for path in folder.iterdir()} == {
        *("overview.md", "overview.csv", "overview.tex"),
        *("dflash.md", "dflash.csv", "dflash.tex"),
        *("audit.md", "audit.csv", "report.html"),
    }
    assert all(path.exists() for path in written)
    assert "LiveCodeBench" in (folder / "dflash.md").read_text()


def test_without_a_looped_row_every_file_is_still_written(tmp_path):
    listed = [entry for entry in build(tmp_path, benchmarks=["gsm8k"], prompts=2) if entry["setting"] == "released"]
    tables.make(parse(tables.Options, arguments(tmp_path, listed, benchmarks=["gsm8k"])))
    written = [*(tmp_path / "tables" / "cpu").iterdir(), *(tmp_path / "plots" / "cpu").iterdir()]
    assert len(written) == 9 + 10
    assert all(path.stat().st_size for path in written)
    overview = pd.read_csv(tmp_path / "tables" / "cpu" / "overview.csv")
    assert overview.empty
    assert "dloop_speedup" in overview


def test_csv_holds_what_the_page_rounds(made):
    root, _, _ = made
    frame = pd.read_csv(root / "tables" / "cpu" / "dflash.csv")
    average = frame[(frame.benchmark == "Avg.") & (frame.draft == "trained") & (frame.target == "small")].iloc[0]
    single = frame[(frame.benchmark != "Avg.") & (frame.draft == "trained") & (frame.target == "small")]
    assert single["benchmark"].tolist() == BENCHMARKS
    assert average["speedup"] == pytest.approx(single["speedup"].mean())
    page = (root / "tables" / "cpu" / "dflash.md").read_text().replace("**", "")
    assert f"{average['speedup']:.2f}x / {average['tau']:.2f}" in page
    overview = pd.read_csv(root / "tables" / "cpu" / "overview.csv")
    assert overview["dloop_speedup"].iloc[0] == average["speedup"]


def test_the_same_results_give_the_same_bytes(made, tmp_path):
    root, listed, _ = made
    more = ["--note", "A note."]
    words = arguments(root, listed, *more)
    words[words.index("--output") + 1] = str(tmp_path / "tables" / "cpu")
    words[words.index("--plots") + 1] = str(tmp_path / "plots" / "cpu")
    tables.make(parse(tables.Options, words))
    for path in (root / "tables").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / path.relative_to(root)).read_bytes()


def test_experiments_may_lie_in_a_file_and_a_cost_table_beside(tmp_path, capsys):
    listed = build(tmp_path, benchmarks=["gsm8k"], prompts=2)
    (tmp_path / "experiments.json").write_text(json.dumps(listed))
    words = arguments(tmp_path, listed, "--cost-table", str(cost_table(tmp_path / "c.json")), benchmarks=["gsm8k"])
    words[words.index("--experiments") + 1] = str(tmp_path / "experiments.json")
    tables.make(parse(tables.Options, words))
    assert "modelled speedup" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "sentence"), [("nowhere.json", "cannot be read"), ("[1,", "is not JSON")])
def test_experiments_that_cannot_be_read_are_refused(given, sentence, tmp_path):
    words = arguments(tmp_path, [])
    words[words.index("--experiments") + 1] = given
    with pytest.raises(UserError, match=sentence):
        tables.make(parse(tables.Options, words))


def test_a_refusal_is_one_sentence_and_writes_nothing(made, tmp_path):
    root, listed, _ = made
    changed = [{**entry, "flags": {**entry["flags"], "loop_gate": -0.75}} for entry in listed]
    words = arguments(root, changed)
    words[words.index("--output") + 1] = str(tmp_path / "tables")
    done = subprocess.run([sys.executable, "-m", "dloop.tables", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "--loop-gate" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "tables").exists()


def test_tables_never_import_torch(made):
    root, listed, _ = made
    code = (
        "import sys\nfrom dloop import tables\nfrom dloop.cli import parse\n"
        "tables.make(parse(tables.Options, sys.argv[1:]))\nsys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments(root, listed)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
