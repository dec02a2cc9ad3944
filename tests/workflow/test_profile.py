"""The profiles and environment files fit the rules: Snakemake ignores a rule name it does not know without a word."""

import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = sorted((ROOT / "workflow/envs").glob("*.yaml"))


def rules() -> dict[str, str]:
    """The text of every rule by its name."""
    found = {}
    for file in [ROOT / "Snakefile", *sorted((ROOT / "workflow/rules").glob("*.smk"))]:
        parts = re.split(r"^rule (\w+):\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return found


def profile() -> dict:
    return yaml.safe_load((ROOT / "slurm/profile.v9+.yaml").read_text(encoding="utf-8"))


def test_every_rule_the_profile_names_exists():
    assert profile()["set-resources"].keys() <= rules().keys()


def test_every_gpu_rule_has_resources_in_the_profile():
    on_gpus = {name for name, text in rules().items() if "gpu=" in text}
    assert on_gpus == profile()["set-resources"].keys()
    assert {"regenerate", "train", "baseline", "evaluate"} <= on_gpus


@pytest.mark.parametrize("directive", ["log:", "conda:", "resources:", "benchmark:", "shell:"])
def test_every_rule_that_runs_something_declares(directive):
    assert [name for name, text in rules().items() if "output:" in text and directive not in text] == []


ENVIRONMENT_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["channels", "dependencies"],
    "properties": {
        "channels": {"const": ["conda-forge"]},
        "dependencies": {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/pip"}]},
            "contains": {"$ref": "#/$defs/pip"},
            "maxContains": 1,
            "allOf": [{"contains": {"pattern": r"^python=3\.1[12]$"}}, {"contains": {"const": "pip"}}],
        },
    },
    "$defs": {
        "pip": {
            "type": "object",
            "additionalProperties": False,
            "required": ["pip"],
            # A relative path would not be found: Snakemake copies the file elsewhere before conda reads it.
            "properties": {"pip": {"type": "array", "uniqueItems": True, "items": {"pattern": r"^[a-zA-Z][^/\\]*$"}}},
        }
    },
}


@pytest.mark.parametrize("file", ENVIRONMENTS, ids=lambda file: file.stem)
def test_environments_have_the_form_that_conda_reads(file):
    Draft202012Validator(ENVIRONMENT_SCHEMA).validate(yaml.safe_load(file.read_text(encoding="utf-8")))


def test_the_form_refuses_what_would_not_work():
    found = yaml.safe_load(ENVIRONMENTS[0].read_text(encoding="utf-8"))
    pip = found["dependencies"].pop()
    for dependencies in ([*found["dependencies"], pip, pip], found["dependencies"], ["python=3.12", pip]):
        wrong = found | {"dependencies": dependencies}
        assert not Draft202012Validator(ENVIRONMENT_SCHEMA).is_valid(wrong)
    local = found | {"dependencies": [*found["dependencies"], {"pip": ["-e ../.."]}]}
    assert not Draft202012Validator(ENVIRONMENT_SCHEMA).is_valid(local)


@pytest.mark.parametrize("file", ENVIRONMENTS, ids=lambda file: file.stem)
def test_environments_are_complete_and_agree_with_the_package(file, package_requirements):
    environment = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert environment.keys() == {"channels", "dependencies"}
    [pip] = [part["pip"] for part in environment["dependencies"] if isinstance(part, dict)]
    for line in pip:
        requirement = Requirement(line)
        assert requirement.specifier, f"{line} names no version"
        if requirement.name in package_requirements and file.stem != "sglang":
            allowed = package_requirements[requirement.name]
            pinned = [part.version for part in requirement.specifier if part.operator == "=="]
            assert requirement.specifier == allowed or all(version in allowed for version in pinned), line


@pytest.fixture
def package_requirements():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}


def test_the_environments_differ_as_they_should():
    core, mtp, sglang = (
        {
            line
            for part in yaml.safe_load(file.read_text())["dependencies"]
            if isinstance(part, dict)
            for line in part["pip"]
        }
        for file in ENVIRONMENTS
    )
    assert mtp - core == {"flash-linear-attention[cuda]==0.5.2"}
    assert core <= mtp
    assert not any(line.startswith(("torch", "transformers")) for line in sglang), "the server decides these"
