"""Every flag the schema lets through is an option of its command."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import dloop.benchmark
import dloop.demo.corpus
import dloop.demo.tiny_target
import dloop.demo.tokenizer
import dloop.prompts
import dloop.regenerate
import dloop.tables
import dloop.train
from dloop.config import HOST_FLAGS, LOOP_FLAGS

SCHEMA = yaml.safe_load((Path(__file__).parents[2] / "workflow/schemas/config.schema.yaml").read_text("utf-8"))
DEFINED = SCHEMA["$defs"]
PARTS = SCHEMA["properties"]
DEMO = PARTS["demo"]["properties"]
SAMPLING = PARTS["targets"]["additionalProperties"]["properties"]["sampling"]


@pytest.mark.parametrize(
    ("part", "stage"),
    [
        (DEFINED["prompt_flags"], dloop.prompts),
        (DEFINED["regeneration_flags"], dloop.regenerate),
        (SAMPLING, dloop.regenerate),
        (DEFINED["training_flags"], dloop.train),
        (DEFINED["released"], dloop.train),
        (DEFINED["evaluation_flags"], dloop.benchmark),
        (PARTS["tables"], dloop.tables),
        (DEMO["corpus"], dloop.demo.corpus),
        (DEMO["tokenizer"], dloop.demo.tokenizer),
        (DEMO["targets"]["additionalProperties"], dloop.demo.tiny_target),
    ],
)
def test_flags_are_options_of_the_command(part, stage):
    assert part["properties"].keys() - {"cost_tables"} <= {field.name for field in fields(stage.Options)}


def test_decoding_flags_are_options_of_the_evaluation():
    assert DEFINED["decoding_flags"]["properties"].keys() <= {field.name for field in fields(dloop.benchmark.Options)}


def test_decoding_flags_are_those_of_the_loop_and_of_some_host():
    assert DEFINED["decoding_flags"]["properties"].keys() == LOOP_FLAGS.union(*HOST_FLAGS.values())


def test_nothing_unknown_passes_anywhere():
    def objects(part):
        if isinstance(part, dict):
            if "properties" in part:
                yield part
            for inner in part.values():
                yield from objects(inner)

    assert all(part.get("additionalProperties") is False for part in objects(SCHEMA))
