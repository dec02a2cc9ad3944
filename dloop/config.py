"""The workflow's configuration: read, checked, and turned into experiments and command lines.

Four registries (targets, hosts with their drafts, settings, benchmarks) span the experiments: every setting
of a host on every target that has drafts for it. Knows nothing of Snakemake or of torch and reads no file but
the schema; the rules ask it for the flags of a job. It lists the experiments of a configuration with

    python -m dloop.config config/config.yaml
    python -m dloop.config config/config.yaml --json > experiments.json
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from dloop.cli import UserError, parse, run
from dloop.data.benchmarks import BENCHMARKS
from dloop.prompts import HUB_IDS

Flags = dict[str, Any]
"""Options of a stage by their field name (`loop_gate`), in the order they are written on its command line."""

SCHEMA = Path("workflow/schemas/config.schema.yaml")

HOST_FLAGS: Mapping[str, frozenset[str]] = {
    "dflash": frozenset({"tree_budget", "stage_tree_budget", "topk_k"}),
    "dspark": frozenset({"tree_budget", "stage_tree_budget", "tree_width", "tree_beta"}),
    "domino": frozenset({"tree_budget", "stage_tree_budget", "tree_width", "tree_beta"}),
    "eagle3": frozenset({"tree_budget", "stage_tree_budget", "topk_k", "tree_depth"}),
    "mtp": frozenset({"mtp_k"}),
}
"""Decoding flags that only some hosts understand; the loop's own fit all of them."""

LOOP_FLAGS = frozenset({"loop_gate", "max_extra_stages"})
DRAFT_ONLY = frozenset({"require_lossless", "mtbench_history"})
"""Evaluation flags that compare with a baseline, so that the baseline itself cannot have them."""
START_FLAGS = {
    "dflash": "draft_init_path",
    "dspark": "draft_init_path",
    "domino": "draft_init_path",
    "eagle3": "ckpt_dir",
    "mtp": "ckpt_dir",
}
"""How `dloop.train` is told which released draft to start from."""
INSIDE_TARGET = "mtp"
"""What stands for a draft that lies in the target's own checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One row of a table: a host's draft on a target under a setting, measured on every benchmark."""

    target: str
    host: str
    setting: str
    draft: str
    flags: Flags


class Configuration:
    """A configuration that passed every check; answers what the rules need to know.

    Raises `UserError` with one sentence when `values` breaks the schema or the registries do not fit.
    """

    def __init__(self, values: Mapping[str, Any], schema: Path = SCHEMA) -> None:
        check_schema(values, yaml.safe_load(schema.read_text(encoding="utf-8")))
        self.values = values
        for problem in _problems(values):
            raise UserError(f"config: {problem}")

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def benchmarks(self) -> list[str]:
        """Names of the benchmarks, in the order of the tables' columns."""
        return list(self.values["benchmarks"])

    @property
    def settings(self) -> list[str]:
        """Names of the settings of all hosts, each once."""
        return list(dict.fromkeys(name for settings in self.values["settings"].values() for name in settings))

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """Every (target, host) that has drafts, hosts in the order of the registry."""
        return [(target, host) for host, entry in self.values["hosts"].items() for target in entry["drafts"]]

    @cached_property
    def experiments(self) -> list[Experiment]:
        """The rows of all tables: the product of the registries, filtered by what exists for a host."""
        return [row for target, host in self.pairs for row in self._rows(target, host)]

    def _rows(self, target: str, host: str) -> Iterator[Experiment]:
        settings = self.values["settings"][host]
        for name, setting in settings.items():
            draft = self.values["loop_draft"] if setting["draft"] == "loop" else setting["draft"]
            yield self._experiment(target, host, name, draft)
        if self.values["control"]:
            yield self._experiment(target, host, next(filter(is_looped, settings)), "control")

    def _experiment(self, target: str, host: str, setting: str, draft: str) -> Experiment:
        flags = self.evaluation_flags(target, host, setting, draft)
        return Experiment(target=target, host=host, setting=setting, draft=draft, flags=flags)

    def trained_drafts(self) -> list[tuple[str, str, str]]:
        """Every (target, host, draft) that `all_training` makes."""
        drafts = ["released", "trained"] + (["control"] if self.values["control"] else [])
        return [
            (target, host, draft)
            for target, host in self.pairs
            for draft in drafts
            if self.is_trained_here(target, host, draft)
        ]

    def is_trained_here(self, target: str, host: str, draft: str) -> bool:
        """Whether the workflow makes a draft; otherwise it is a repository or somebody's folder."""
        return draft in ("trained", "control") or isinstance(self._draft(target, host, draft), dict)

    def _draft(self, target: str, host: str, draft: str) -> Any:
        drafts = self.values["hosts"].get(host, {}).get("drafts", {}).get(target)
        if drafts is None:
            raise UserError(f"host {host!r} has no drafts for target {target!r} in the configuration")
        if draft not in drafts:
            raise UserError(f"hosts.{host}.drafts.{target} has no {draft!r} draft: add it, or ask for another")
        return drafts[draft]

    def draft_source(self, target: str, host: str, draft: str) -> str:
        """What `--draft-model` is given: a repository id, or the folder the workflow writes."""
        if self.is_trained_here(target, host, draft):
            return f"{self.training_folder(target, host, draft)}/final"
        return str(self._draft(target, host, draft))

    def _draft_flags(self, target: str, host: str, draft: str, flag: str) -> Flags:
        repository, revision = split_revision(self.draft_source(target, host, draft))
        return {flag: repository} if revision is None else {flag: repository, "draft_revision": revision}

    def repositories(self) -> list[tuple[str, str | None]]:
        """The models of the hub that the configuration names, each with its revision if one is given."""
        targets = [(entry["model"], entry.get("revision")) for entry in self.values["targets"].values()]
        drafts = [self._drafts_of(*pair) for pair in self.pairs]
        named = [split_revision(source) for sources in drafts for source in sources]
        found = [(name, revision) for name, revision in [*targets, *named] if _is_repository(name)]
        return list(dict.fromkeys(found))

    def _drafts_of(self, target: str, host: str) -> list[str]:
        drafts = self.values["hosts"][host]["drafts"][target]
        return [drafts[name] for name in ("released", "published") if isinstance(drafts.get(name), str)]

    def hub_environment(self) -> dict[str, str]:
        """Variables that tell every job where models and data sets are kept, and whether it may ask the hub."""
        hub = self.values.get("hub", {})
        folders = {"HF_HOME": hub.get("cache"), "DLOOP_HUB_MIRROR": hub.get("mirror")}
        found = {name: str(Path(folder).absolute()) for name, folder in folders.items() if folder is not None}
        return found | ({"HF_HUB_OFFLINE": str(int(hub["offline"]))} if "offline" in hub else {})

    def training_folder(self, target: str, host: str, draft: str) -> str:
        """Where a draft is trained, with its checkpoints on the way."""
        return f"results/train/{target}/{host}/{draft}"

    def evaluation_flags(self, target: str, host: str, setting: str, draft: str) -> Flags:
        """Every option of `dloop.benchmark` that decides what an evaluation decodes."""
        settings = self.values["settings"].get(host, {})
        if setting not in settings:
            raise UserError(f"host {host!r} has no setting {setting!r}: it has {', '.join(settings) or 'none'}")
        chosen = settings[setting]
        return {
            **self._target_flags(target),
            **self.runtime_flags(target),
            **self.values["evaluation"],
            **self._draft_flags(target, host, draft, "draft_model"),
            **chosen.get("flags_for", {}).get(target, chosen["flags"]),
        }

    def baseline_flags(self, target: str) -> Flags:
        """Every option of `dloop.benchmark` that decides what a target's baseline decodes."""
        shared = {key: value for key, value in self.values["evaluation"].items() if key not in DRAFT_ONLY}
        return {**self._target_flags(target), **self.runtime_flags(target), **shared}

    def runtime_flags(self, target: str) -> Flags:
        """What computes a target while it decodes; nothing where that is left to the commands."""
        entry = self.values["targets"][target]
        return {"target_runtime": entry["target_runtime"]} if "target_runtime" in entry else {}

    def cost_flags(self, target: str, host: str) -> Flags:
        """Every option of `dloop.cost_table` that decides what is timed: the released draft stands for all others."""
        draft = self._draft_flags(target, host, "released", "draft_model")
        return {**self._target_flags(target), **self.runtime_flags(target), **draft, **self.device_flags()}

    @property
    def has_cost_tables(self) -> bool:
        """Whether the tables show a modelled speedup beside the measured one."""
        return bool(self.values["tables"].get("cost_tables"))

    def table_flags(self) -> Flags:
        """Options of `dloop.tables` that the configuration states as they are."""
        return {name: value for name, value in self.values["tables"].items() if name != "cost_tables"}

    def device_flags(self) -> Flags:
        """Where evaluations run and in which precision."""
        return {key: self.values["evaluation"][key] for key in ("dtype", "device") if key in self.values["evaluation"]}

    def _target_flags(self, target: str, flag: str = "model") -> Flags:
        entry = self.values["targets"][target]
        revision = {"revision": entry["revision"]} if "revision" in entry else {}
        return {flag: entry["model"], **revision}

    def dataset(self, benchmark: str) -> str:
        """What `--dataset` is given: the registered name, or the file of a local benchmark."""
        return str(self.values["benchmarks"][benchmark].get("file", benchmark))

    def prompt_flags(self) -> Flags:
        """Every option of `dloop.prompts` that decides what the prompts are: a file or a hub data set."""
        entry = self.values["prompts"]
        flags = entry.get("flags", {})
        return dict(flags) if "data_path" in flags else {"dataset": entry["dataset"], **flags}

    def regeneration_flags(self, target: str) -> Flags:
        """Every option of `dloop.regenerate` that decides what the target answers."""
        sampling = self.values["targets"][target]["sampling"]
        return {**self._target_flags(target), **sampling, **self.values["regenerate"]["flags"]}

    def training_flags(self, target: str, host: str, draft: str) -> Flags:
        """Every option of `dloop.train` that decides what a draft becomes, its start included."""
        family = self.values["hosts"][host]
        own = family["drafts"].get(target, {})
        flags = {
            **self._target_flags(target, "target_model_path"),
            "chat_template": self.values["targets"][target]["chat_template"],
            **self.values["training"],
            **family["training"],
            **own.get("training", {}),
        }
        if not self.is_trained_here(target, host, draft):
            raise UserError(f"hosts.{host}.drafts.{target}.{draft} is a finished draft: there is nothing to train")
        if draft == "released":
            return flags | self._draft(target, host, draft)
        if self.draft_source(target, host, "released") != INSIDE_TARGET:
            flags |= self._draft_flags(target, host, "released", START_FLAGS[host])
        return flags | (family["control"] | own.get("control", {}) if draft == "control" else {})


def read_file(path: Path) -> Any:
    """What a configuration file holds; a UserError when it cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); give a configuration, as config/config.yaml"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML ({' '.join(str(error).split())}); correct it") from None


def split_revision(source: str) -> tuple[str, str | None]:
    """`owner/name@revision` as its two parts; anything else is a repository or folder without one."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)@([\w.-]+)", source)
    return (match[1], match[2]) if match else (source, None)


def _is_repository(source: str) -> bool:
    """Whether a model comes from the hub: not a folder that is there, not one the workflow makes."""
    made_here = source.startswith(("results/", "/", "."))
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", source)) and not made_here and not Path(source).exists()


def command_line(flags: Mapping[str, Any]) -> str:
    """`{"loop_gate": -0.5, "strict_data": True}` as `--loop-gate -0.5 --strict-data`, quoted for a shell."""
    words: list[str] = []
    for name, value in flags.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", shlex.quote(str(value))]
    return " ".join(words)


def check_schema(values: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise `UserError` with one sentence for the first place where `values` breaks the JSON schema."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    errors = sorted(Draft202012Validator(schema).iter_errors(values), key=lambda error: list(map(str, error.path)))
    if errors:
        raise UserError(f"config: {_sentence(errors[0])}")


def _sentence(error: Any) -> str:
    place, found = ".".join(map(str, error.absolute_path)) or "the top level", error.instance
    if error.validator == "additionalProperties":
        known = list(error.schema.get("properties", ()))
        unknown = next(key for key in found if key not in known)
        return f"{unknown!r} is not a key of {place}{_suggestion(unknown, known)}"
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in found)
        return f"{place} lacks the key {missing!r}"
    if error.validator == "enum":
        return f"{place} does not know {found!r}{_suggestion(found, error.validator_value)}"
    if error.validator == "type" and "number" in error.validator_value and _looks_numeric(found):
        return f"{place} is the text {found!r}: YAML reads a number only with a point in it, as 6.0e-4"
    if error.validator == "type" and error.validator_value == "boolean":
        return f"{place} is {found!r}: write true or false in the file, --config {place}=True on a command line"
    if error.validator == "pattern":
        return f"{place}: the name {found!r} may hold only lower-case letters, digits, points and hyphens"
    return f"{place}: {error.message}"


def _looks_numeric(found: object) -> bool:
    return isinstance(found, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", found, re.IGNORECASE) is not None


def _suggestion(word: object, known: Sequence[Any]) -> str:
    close = difflib.get_close_matches(str(word), list(map(str, known)), n=1)
    return f": did you mean {close[0]!r}?" if close else f": it knows {', '.join(map(str, known))}"


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What JSON schema cannot say: how the registries fit together."""
    yield from _registry_problems(values)
    dataset = values["prompts"]["dataset"]
    if dataset not in HUB_IDS and "data_path" not in values["prompts"].get("flags", {}):
        hint = _suggestion(dataset, list(HUB_IDS))
        yield f"prompts.dataset: {dataset!r} is not a known data set and has no data_path{hint}"
    if values["regenerate"]["servers"] and values["regenerate"]["launch_servers"]:
        yield "regenerate.servers names running servers and regenerate.launch_servers starts others: keep one of them"
    for host, settings in values["settings"].items():
        for name, setting in settings.items():
            for flags in (setting["flags"], *setting.get("flags_for", {}).values()):
                yield from _flag_problems(host, f"settings.{host}.{name}", flags)
                if not is_looped(name) and (setting["draft"] == "loop" or LOOP_FLAGS & flags.keys()):
                    yield f"settings.{host}.{name} loops: give it a name that begins with 'dloop'"
    for name, entry in values["benchmarks"].items():
        if "file" not in entry and name not in BENCHMARKS:
            hint = _suggestion(name, list(BENCHMARKS))
            yield f"benchmarks: {name!r} is not a registered benchmark and has no file{hint}"


def _registry_problems(values: Mapping[str, Any]) -> Iterator[str]:
    targets, hosts, settings = values["targets"], values["hosts"], values["settings"]
    for host in settings.keys() - hosts.keys():
        yield f"settings.{host} belongs to a host that hosts does not list"
    for host in hosts.keys() - settings.keys():
        yield f"hosts.{host} is evaluated under no setting: add settings.{host} or remove the host"
    for host in hosts.keys() & settings.keys():
        if "released" not in settings[host] or not any(map(is_looped, settings[host])):
            yield f"settings.{host} needs the setting 'released' and one that begins with 'dloop', to compare them"
    for host, entry in hosts.items():
        for target, drafts in entry["drafts"].items():
            if target not in targets:
                yield f"hosts.{host}.drafts: {target!r} is not a target{_suggestion(target, list(targets))}"
            if values["loop_draft"] == "published" and "published" not in drafts:
                yield f"hosts.{host}.drafts.{target} has no published draft: set loop_draft to trained"
        for name, setting in settings.get(host, {}).items():
            for target in setting.get("flags_for", {}).keys() - entry["drafts"].keys():
                yield f"settings.{host}.{name}.flags_for: host {host} has no drafts for target {target!r}"
    used = {target for entry in hosts.values() for target in entry["drafts"]}
    for target in targets.keys() - used:
        yield f"targets.{target} is used by no host: add drafts for it or remove it"


def is_looped(setting: str) -> bool:
    """Whether a setting of this name asks for additional stages: tables tell them by the first word."""
    return setting.split("-")[0] == "dloop"


def _flag_problems(host: str, place: str, flags: Mapping[str, Any]) -> Iterator[str]:
    allowed = LOOP_FLAGS | HOST_FLAGS[host]
    for flag in flags:
        if flag not in allowed:
            owners = ", ".join(name for name, own in HOST_FLAGS.items() if flag in own)
            yield f"{place}: {flag} is a flag of {owners}, {host} does not know it"
    needs_tree = {"stage_tree_budget", "topk_k", "tree_width", "tree_beta"} & flags.keys()
    if host != "eagle3" and needs_tree and "tree_budget" not in flags:
        yield f"{place}: {', '.join(sorted(needs_tree))} has no effect without tree_budget"


@dataclass(frozen=True)
class Options:
    """Show the experiments of a configuration file, one a line, as the workflow would run them."""

    file: Annotated[Path, tyro.conf.Positional]
    """The configuration, as config/config.yaml."""
    json: bool = False
    """As the list that `python -m dloop.tables --experiments` reads."""


def main() -> None:
    """Print the experiments, as text or for `dloop.tables`."""
    options = parse(Options)
    experiments = Configuration(read_file(options.file)).experiments
    if options.json:
        print(json.dumps([vars(row) for row in experiments]))
        return
    for row in experiments:
        print(f"{row.target:12} {row.host:8} {row.setting:18} {row.draft:10} {command_line(row.flags)}")


if __name__ == "__main__":
    run(main)
