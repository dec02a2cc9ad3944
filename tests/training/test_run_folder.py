"""Whose a folder is: going on, refusing, moving aside."""

import json

import pytest

from dloop.cli import UserError
from dloop.training.run_folder import CONFIG_FILE, claim, differences, fingerprint, is_finished

CONFIG = {"--learning-rate": 0.1, "--seed": 1}


def start(folder, config=CONFIG, **how):
    return claim(folder, config, **({"resume": True, "move_aside": False} | how))


@pytest.fixture
def run(tmp_path):
    """A folder with a run of two checkpoints."""
    folder = tmp_path / "run"
    start(folder)
    for name in ("epoch_0_step_2", "epoch_0_step_10"):
        (folder / name).mkdir()
    return folder


class TestClaim:
    def test_an_empty_place_starts_anew(self, tmp_path):
        assert start(tmp_path / "deep" / "run") is None
        assert json.loads((tmp_path / "deep" / "run" / CONFIG_FILE).read_text()) == CONFIG

    def test_the_same_run_goes_on_from_its_newest_checkpoint(self, run):
        assert start(run) == run / "epoch_0_step_10"

    def test_a_run_without_weights_starts_anew_whatever_its_configuration(self, tmp_path):
        start(tmp_path)
        assert start(tmp_path, {"--seed": 2}) is None
        assert json.loads((tmp_path / CONFIG_FILE).read_text()) == {"--seed": 2}

    def test_half_written_saves_are_cleared(self, run):
        (run / ".epoch_0_step_20.a.tmp").mkdir()
        assert start(run) == run / "epoch_0_step_10"
        assert not (run / ".epoch_0_step_20.a.tmp").exists()

    def test_another_configuration_is_refused_by_its_flags(self, run):
        with pytest.raises(UserError) as refusal:
            start(run, {"--learning-rate": 0.2, "--seed": 1})
        assert "--learning-rate was 0.1, is 0.2" in str(refusal.value)
        assert "--seed" not in str(refusal.value)
        assert "--on-config-change move-aside" in str(refusal.value)

    def test_another_configuration_moves_the_old_run_aside(self, run, capsys):
        other = {**CONFIG, "--seed": 2}
        assert start(run, other, move_aside=True) is None
        assert (run.with_name("run.aside-1") / "epoch_0_step_10").is_dir()
        assert "--seed was 1, is 2" in capsys.readouterr().out
        assert json.loads((run / CONFIG_FILE).read_text()) == other
        (run / "final").mkdir()
        start(run, CONFIG, move_aside=True)
        assert json.loads((run.with_name("run.aside-2") / CONFIG_FILE).read_text()) == other

    def test_no_resume_refuses_or_moves_aside_what_is_there(self, run):
        with pytest.raises(UserError, match="--no-resume"):
            start(run, resume=False)
        assert start(run, resume=False, move_aside=True) is None
        assert start(run, resume=False) is None

    def test_checkpoints_of_unknown_origin_are_refused(self, run):
        (run / CONFIG_FILE).unlink()
        with pytest.raises(UserError, match=f"epoch_0_step_2 but no {CONFIG_FILE}"):
            start(run)


def test_differences_name_added_and_removed_flags():
    assert differences({"--a": 1, "--old": 3}, {"--a": 1, "--new": None}) == [
        "--new was absent, is None",
        "--old was 3, is absent",
    ]


class TestFingerprint:
    def test_of_a_folder_is_what_its_files_hold(self, tmp_path):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        same = fingerprint(str(tmp_path / "one"))
        assert same == fingerprint(str(tmp_path / "two"))
        (tmp_path / "two" / "training_state.pt").write_bytes(b"state")
        assert same == fingerprint(str(tmp_path / "two"))
        (tmp_path / "two" / "model.safetensors").write_bytes(b"other")
        assert same != fingerprint(str(tmp_path / "two"))

    def test_of_a_file_is_its_hash(self, tmp_path):
        (tmp_path / "data.jsonl").write_bytes(b"")
        assert fingerprint(str(tmp_path / "data.jsonl")).startswith("sha256:e3b0c44298fc1c14")

    def test_of_a_hub_name_is_the_name_with_its_revision(self):
        assert fingerprint("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
        assert fingerprint("Qwen/Qwen3-4B", "abc") == "Qwen/Qwen3-4B@abc"


def test_a_run_is_finished_with_draft_and_manifest(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").touch()
    assert not is_finished(tmp_path)
    (tmp_path / "manifest.json").touch()
    assert is_finished(tmp_path)
