import dataclasses
import json
import math

import pytest

from dloop.cli import UserError
from dloop.results import checks
from dloop.results.record import from_json, read_result, to_json, write_result
from tests.results.fabricate import invented, response, result


def test_a_result_survives_the_file(tmp_path):
    made = invented("gsm8k", host="dflash", openness=0.3, turns=2)
    write_result(tmp_path / "r.json", made)
    assert read_result(tmp_path / "r.json") == made


def test_minus_infinity_travels_as_text(tmp_path):
    made = result([response(gate_sums=[[-math.inf, -2.0], [-1.5]])])
    made.config["loop_gate"] = -math.inf
    write_result(tmp_path / "r.json", made)
    raw = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert raw["config"]["loop_gate"] == "-inf"
    assert raw["responses"][0]["gate_sums"] == [["-inf", -2.0], [-1.5]]
    assert read_result(tmp_path / "r.json") == made


def test_a_text_that_reads_like_infinity_stays_a_text(tmp_path):
    write_result(tmp_path / "r.json", result([response(text="-inf")]))
    assert read_result(tmp_path / "r.json").responses[0].text == "-inf"


def test_tuples_and_paths_of_the_options_become_plain(tmp_path):
    made = result([response()])
    made.config |= {"stop_token_ids": (1, 2), "output": [tmp_path / "r.json"]}
    assert to_json(made)["config"]["stop_token_ids"] == [1, 2]
    assert to_json(made)["config"]["output"] == [str(tmp_path / "r.json")]


def test_the_file_holds_one_response_a_line(tmp_path):
    made = invented("gsm8k", prompts=3)
    write_result(tmp_path / "r.json", made)
    lines = (tmp_path / "r.json").read_text().splitlines()
    assert sum('"output_ids"' in line for line in lines) == 3


def test_files_from_before_stages_were_counted_are_read(tmp_path):
    write_result(tmp_path / "r.json", result([response()]))
    raw = json.loads((tmp_path / "r.json").read_text())
    for name in checks.RECORDED_LATER:
        del raw["responses"][0][name]
    (tmp_path / "r.json").write_text(json.dumps(raw))
    assert read_result(tmp_path / "r.json").responses == [response(stage_rows=[], stage_accepted=[])]


def test_a_result_without_responses_is_one(tmp_path):
    write_result(tmp_path / "r.json", result([]))
    assert read_result(tmp_path / "r.json").responses == []


def test_an_answer_of_one_stop_token_has_no_rounds(tmp_path):
    names = ("acceptance_lengths", "extra_stages", "verified_tokens", *checks.BY_STAGE)
    rounds = {name: [] for name in names}
    empty = response(**rounds, num_output_tokens=1, output_ids=[1], decode_time=0.0, tpot=0.0)
    write_result(tmp_path / "r.json", result([empty]))
    assert read_result(tmp_path / "r.json").responses == [empty]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"extra_stages": [1]}, "extra_stages has 1 rounds, acceptance_lengths 2"),
        ({"verified_tokens": [7, 4, 4]}, "verified_tokens has 3 rounds"),
        ({"gate_sums": [[-0.1], [-1.5]]}, "gate_sums must hold one number a stage"),
        ({"stage_lengths": [[3, 3], [3, 3]]}, "stage_lengths must hold one number a stage"),
        ({"acceptance_lengths": [4, 0]}, "accepted 0 tokens"),
        ({"acceptance_lengths": [4, 5], "num_output_tokens": 7}, "accepted 5 tokens of 4 verified"),
        ({"extra_stages": [1, -1]}, "-1 additional stages"),
        ({"num_output_tokens": 6}, "output_ids holds 7"),
        ({"num_output_tokens": 8, "output_ids": [1] * 8, "tpot": 0.07 / 8}, "produced 5 to 7"),
        ({"num_output_tokens": 4, "output_ids": [1] * 4, "tpot": 0.07 / 4}, "produced 5 to 7"),
        ({"stage_rows": [[3, 3]]}, "stage_rows must hold one number a stage"),
        ({"stage_rows": [[3, 2], [3]]}, "stage_rows of a round must add up to verified_tokens less one"),
        ({"stage_accepted": [[2, 0], [1]]}, "stage_accepted of a round must add up to acceptance_lengths less one"),
        ({"finish": "eos"}, "either stop or length"),
        ({"finish": "length"}, "finish is length after 7 tokens with max_new_tokens 256"),
        ({"tpot": 0.02}, "tpot is not"),
        ({"row": 1}, "row is 1, the selection has 0"),
        ({"index": 3}, "outside the selection"),
        ({"divergence_margin": 0.1}, "without first_divergence"),
    ],
)
def test_rounds_that_contradict_each_other_are_refused(changes, sentence, tmp_path):
    made = result([response()])
    made.responses[0] = dataclasses.replace(made.responses[0], **changes)
    with pytest.raises(ValueError, match=sentence):
        write_result(tmp_path / "r.json", made)
    assert not (tmp_path / "r.json").exists()
    raw = json.loads(json.dumps(to_json(made)))
    with pytest.raises(ValueError, match=sentence):
        from_json(raw)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda raw: raw.update(schema=2), "schema is 2, this version reads schema 1"),
        (lambda raw: raw.pop("schema"), "schema is None"),
        (lambda raw: raw.update(kind="other"), "kind is 'other'"),
        (lambda raw: raw.update(host=None), "only speculative ones name a host"),
        (lambda raw: raw.update(extra=1), "unknown keys: extra"),
        (lambda raw: raw.pop("summary"), "lacks summary"),
        (lambda raw: raw["env"].pop("gpu"), "env lacks gpu"),
        (lambda raw: raw["dataset"].pop("split"), "dataset lacks split"),
        (lambda raw: raw["dataset"].update(selected_rows=["0"]), "dataset has selected_rows"),
        (lambda raw: raw["responses"][0].update(turns=1), "response 0 has unknown keys: turns"),
        (lambda raw: raw["responses"][0].update(ttft="1"), "response 0 has ttft = '1'"),
        (lambda raw: raw["responses"][0].update(turn=True), "turn = 'True', which is of the wrong type"),
        (lambda raw: raw["responses"][0].update(extra_stages=[1, 0.0]), "extra_stages"),
        (lambda raw: raw["responses"].append(raw["responses"][0]), "or one is there twice"),
    ],
)
def test_files_of_another_shape_are_refused_with_their_name(change, sentence, tmp_path):
    raw = to_json(result([response()]))
    raw = json.loads(json.dumps(raw))
    change(raw)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=sentence) as error:
        read_result(path)
    assert str(path) in str(error.value)


def test_a_baseline_drafts_nothing(tmp_path):
    made = invented("gsm8k", prompts=1)
    write_result(tmp_path / "r.json", made)
    made.responses[0].extra_stages[0] = 1
    with pytest.raises(ValueError, match="without additional stages"):
        write_result(tmp_path / "r.json", made)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"missing\.json cannot be read"):
        read_result(tmp_path / "missing.json")
    (tmp_path / "half.json").write_text('{"schema": 1, "ki')
    with pytest.raises(UserError, match=r"half\.json is not JSON"):
        read_result(tmp_path / "half.json")
