"""Every command of the page for a life without Snakemake is one that its module understands."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

import dloop.train
from dloop.cli import parse

PAGE = Path(__file__).parents[1] / "docs/by-hand.md"


def commands():
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def options(line):
    words = shlex.split(line.partition(" > ")[0])
    place = next(number for number, word in enumerate(words) if word.startswith("dloop."))
    if words[place] == "dloop.launch":
        parse(import_module("dloop.launch").Options, words[place + 1 : words.index("--")])
        place = words.index("--") + 1
    return words[place], parse(import_module(words[place]).Options, words[place + 1 :])


@pytest.mark.parametrize("line", commands())
def test_the_module_understands(line):
    module, parsed = options(line)
    if module == "dloop.train":
        dloop.train.check(parsed)
    elif module == "dloop.regenerate":
        parsed.check()


def test_every_stage_and_every_family_of_drafts_has_a_line():
    modules = [options(line)[0] for line in commands()]
    assert {f"dloop.{stage}" for stage in ("prompts", "regenerate", "train", "benchmark", "config", "tables")} == set(
        modules
    )
    assert modules.count("dloop.train") == 6
