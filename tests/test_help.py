"""The help of every command shows how to call it."""

import importlib

import pytest

from dloop.cli import parse

COMMANDS = (
    *("prompts", "regenerate", "train", "benchmark", "tables", "checkpoint", "gate_sweep", "chat", "cost_table"),
    *("demo.corpus", "demo.tokenizer", "demo.tiny_target"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_examples_and_explains_every_option(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    module = importlib.import_module(f"dloop.{command}")
    with pytest.raises(SystemExit) as ended:
        parse(module.Options, ["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"-m dloop.{command}" in out.split("options")[0]
    for name in module.Options.__dataclass_fields__:
        assert name.replace("_", "-") in out or name.upper() in out
