"""Prompts from a local file, a JSON array and a mirrored hub data set."""

import json
from pathlib import Path

import pytest

from dloop import prompts
from dloop.cli import UserError
from dloop.data.conversations import iter_lines, parse_row
from dloop.prompts import Options, prepare, prepare_file

CASES = Path(__file__).parent / "golden" / "cases"


def lines(path):
    return [json.loads(line) for line in path.read_bytes().decode("utf-8").split("\n")[:-1]]


def expected_preparations():
    for file in sorted(CASES.glob("*.expected.json")):
        for line in json.loads(file.read_text("utf-8")).get("lines", ()):
            if "prepare" in line:
                yield file.name.removesuffix(".expected.json"), line["line"] - 1, line["prepare"]


def test_rows_of_the_collected_cases_are_converted_as_expected():
    wanted = list(expected_preparations())
    assert len(wanted) == 7
    for name, number, expected in wanted:
        source = parse_row(dict(iter_lines(CASES / f"{name}.jsonl"))[number])
        prepared = prepare(source, number, own_id=True)
        assert prepared.skipped_messages == expected["skipped_messages"]
        if expected["status"] == "kept":
            assert prepared.row == {key: expected[key] for key in ("id", "conversations")}
        else:
            assert (prepared.row, prepared.reason) == (None, expected["reason"])


@pytest.mark.parametrize("name", sorted(path.stem for path in CASES.glob("*.jsonl")))
def test_no_case_stops_the_conversion(name, tmp_path, capsys):
    source, output = CASES / f"{name}.jsonl", tmp_path / "out.jsonl"
    prepare_file(Options(data_path=source, output=output))
    rows = lines(output)
    assert all(turn["role"] in ("user", "assistant") for row in rows for turn in row["conversations"])
    assert f"{len(rows)} of {len(list(iter_lines(source)))} rows" in capsys.readouterr().out


def test_a_json_array_gives_the_same_file_as_json_lines(tmp_path):
    rows = [
        {"id": 7, "conversations": [{"from": "human", "value": "Grüße"}]},
        "no row",
        {"conversations": None},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows), "utf-8")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    for name in ("a.json", "a.jsonl"):
        prepare_file(Options(data_path=tmp_path / name, output=tmp_path / f"{name}.out"))
    assert (tmp_path / "a.json.out").read_bytes() == (tmp_path / "a.jsonl.out").read_bytes()
    assert (tmp_path / "a.json.out").read_text("utf-8") == (
        '{"id": "7", "conversations": [{"role": "user", "content": "Grüße"}]}\n'
    )


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A mirror of PerfectBlend with 41 rows, one of them without a question."""
    from datasets import Dataset

    rows = [
        {"conversations": [{"from": "system" if i == 3 else "human", "value": f"q{i}"}], "source": "s"}
        for i in range(41)
    ]
    folder = tmp_path / "mirror" / "mlabonne" / "open-perfectblend" / "data"
    folder.mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(str(folder / "train-00000-of-00001.parquet"))
    monkeypatch.setenv("DLOOP_HUB_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return Dataset.from_list([{"i": str(i)} for i in range(41)])


def test_hub_rows_are_known_by_their_number_and_written_once(hub, tmp_path, capsys):
    options = Options(dataset="perfectblend", output_path=tmp_path / "out", sample_size=5)
    prepare_file(options)
    output = tmp_path / "out" / "perfectblend_train.jsonl"
    assert [row["id"] for row in lines(output)] == ["0", "1", "2", "4"]
    assert lines(output)[0] == {"id": "0", "conversations": [{"role": "user", "content": "q0"}]}
    assert "left out: messages 1, no_user 1" in capsys.readouterr().out
    output.write_bytes(b"mine")
    prepare_file(options)
    assert output.read_bytes() == b"mine"
    assert "nothing to do" in capsys.readouterr().out
    prepare_file(Options(dataset="perfectblend", output=output, overwrite=True))
    assert len(lines(output)) == 40


def test_the_evaluation_split_is_that_of_the_datasets_library(hub, tmp_path):
    prepare_file(Options(dataset="perfectblend", output_path=tmp_path, split_eval=True))
    parts = hub.train_test_split(test_size=0.05, seed=42)
    for part in ("train", "test"):
        ids = [row["id"] for row in lines(tmp_path / f"perfectblend_{part}.jsonl")]
        assert ids == [row["i"] for row in parts[part] if row["i"] != "3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to read"),
        ({"data_path": Path("absent.jsonl")}, "no file absent"),
        ({"dataset": "perfectblend", "sample_size": 0}, "at least 1"),
        ({"dataset": "perfectblend", "output": Path("f.jsonl"), "split_eval": True}, "two files"),
    ],
)
def test_options_that_cannot_be_followed(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        prepare_file(Options(**options))


def test_a_file_without_a_usable_row_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"conversations": [{"from": "gpt", "value": "a"}]}\n{"id": 1}\n')
    with pytest.raises(UserError, match="no_user 1, missing_conversations 1"):
        prepare_file(Options(data_path=tmp_path / "a.jsonl", output=tmp_path / "out" / "b.jsonl"))
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "a.json").write_text("[1, 2")
    with pytest.raises(UserError, match="JSON array"):
        prepare_file(Options(data_path=tmp_path / "a.json", output=tmp_path / "b.jsonl"))


def test_an_interrupted_run_leaves_no_file(hub, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(prompts, "prepare", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare_file(Options(dataset="perfectblend", output=tmp_path / "out" / "b.jsonl"))
    assert list((tmp_path / "out").iterdir()) == []
