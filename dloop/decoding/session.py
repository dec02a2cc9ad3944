"""One process's part of an evaluation: the models it has loaded, its share of the prompts, the result in the end.

Takes the options of `dloop.benchmark`; knows no file but the checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import set_seed

from dloop.cli import UserError
from dloop.data.benchmarks import Benchmark
from dloop.decoding.evaluation import WARM_UP_TOKENS, Answer, Evaluator
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, SilentDrafter
from dloop.decoding.static_drafter import over_static_shapes
from dloop.decoding.target import Target
from dloop.hosts.host import Drafter, Host
from dloop.hosts.registry import INSIDE_TARGET, load_host
from dloop.hosts.target_model import DTYPES, embedding, load_target, load_tokenizer, stop_tokens
from dloop.hosts.tree_options import CHAIN_FLAGS, FLAGS, LINEAR, TreeOptions, resolve_tree
from dloop.results.metrics import compare_settings, summarise
from dloop.results.provenance import environment
from dloop.results.record import Dataset, ResponseRecord, Result

if TYPE_CHECKING:
    from dloop.benchmark import Options
    from dloop.training.distributed import World

ATTENTION = "sdpa"


class Session:
    """Loads once, measures benchmark after benchmark."""

    def __init__(self, options: Options, world: World, benchmarks: list[Benchmark]) -> None:
        self.options, self.world = options, world
        self.dtype = options.dtype or ("bfloat16" if world.device.type == "cuda" else "float32")
        set_seed(options.seed)
        torch.backends.cudnn.deterministic = True
        speaks = any(prompt.turns is not None for benchmark in benchmarks for prompt in benchmark.prompts)
        given = options.given_stops()
        self.tokenizer = None
        if speaks or given is None:
            self.tokenizer = load_tokenizer(options.model, options.revision)
        self.model = load_target(
            options.model,
            dtype=DTYPES[self.dtype],
            device=world.device,
            revision=options.revision,
            attn=ATTENTION,
        )
        _check_ids(benchmarks, embedding(self.model).num_embeddings)
        self.stops = stop_tokens(self.model, self.tokenizer) if given is None else given
        self.host = self._load_draft()
        self.tree = self._tree_options()
        self.evaluator = self._evaluator()
        # Graphs are captured for lengths as they are met, so the longest is met before anything is measured.
        tokens = options.max_new_tokens if options.runtime == "graphs" else WARM_UP_TOKENS
        self.evaluator.warm_up(benchmarks[0].prompts[0], options.warmup_runs, tokens)

    def _load_draft(self) -> Host | None:
        source, revision = self.options.draft_model, self.options.draft_revision
        if source is None:
            return None
        if source == INSIDE_TARGET:
            source, revision = self.options.model, self.options.revision
        host = load_host(source, dtype=DTYPES[self.dtype], device=self.world.device, revision=revision)
        host.check_target(self.model)
        host.network.eval().requires_grad_(False)
        return host

    def _tree_options(self) -> TreeOptions:
        if self.host is None:
            return LINEAR
        given = {name: getattr(self.options, name) for name in FLAGS}
        return resolve_tree(self.host.name, self.host.tree_defaults, given)

    def _evaluator(self) -> Evaluator:
        gate = Gate(self.options.loop_gate, self.options.max_extra_stages)
        graphs = self.options.runtime == "graphs"
        runtime = "graphs" if graphs else self.options.target_runtime
        target = Target(self.model, self.host.taps if self.host else (), runtime)
        drafter: Drafter = self.host.drafter(self.model, self.tree, target.cache) if self.host else SilentDrafter()
        return Evaluator(
            target=target,
            drafter=over_static_shapes(drafter) if graphs and self.host else drafter,
            settings=Settings(
                max_new_tokens=self.options.max_new_tokens,
                stop_ids=self.stops,
                gate=gate,
                tree_budget=self.tree.tree_budget,
                stage_tree_budget=self.tree.stage_tree_budget,
            ),
            tokenizer=self.tokenizer,
            drafts=self.host is not None,
            thinking=self.options.thinking,
        )

    def measure(self, benchmark: Benchmark, baseline: Result | None, baseline_path: tuple[Path, ...]) -> Result | None:
        """The result of one benchmark, on rank 0; the others return None."""
        result = Result(
            kind="speculative" if self.host else "baseline",
            host=self.host.name if self.host else None,
            config=self._resolved(benchmark),
            env=self._environment(),
            dataset=_dataset(benchmark),
            responses=[],
            summary={},
        )
        if baseline is not None:
            errors, warnings = compare_settings(result, baseline)
            if errors:
                raise UserError(f"{baseline_path[0]} is no baseline for this run: {'; '.join(errors)}")
            for warning in warnings:
                self.world.say(f"warning: {warning}")
        answers = self._answer_share(benchmark, baseline)
        records = self._gather(self._audited(answers, baseline))
        if not self.world.is_main:
            return None
        records.sort(key=lambda record: (record.index, record.turn))
        path = str(baseline_path[0]) if baseline_path else None
        return replace(result, responses=records, summary=summarise(records, baseline, path))

    def _resolved(self, benchmark: Benchmark) -> dict[str, Any]:
        resolved = {
            "dtype": self.dtype,
            "device": self.world.device.type,
            "stop_token_ids": sorted(self.stops),
            **self._recorded_tree(),
            "dataset": [benchmark.name],
        }
        return self.options.recorded() | resolved

    def _recorded_tree(self) -> dict[str, Any]:
        """The resolved flags of this host's tree; in linear mode those that shape a chain."""
        flags = self.host.tree_defaults if self.host else ()
        return {name: getattr(self.tree, name) for name in flags if self.tree.tree_budget or name in CHAIN_FLAGS}

    def _environment(self) -> dict[str, Any]:
        return environment(self.world.device, self.dtype, ATTENTION)

    def _answer_share(self, benchmark: Benchmark, baseline: Result | None) -> list[Answer]:
        """This process's share of the prompts: every W-th, all turns of a prompt in one place."""
        if baseline is not None and self.options.mtbench_history == "baseline":
            said = {(record.index, record.turn): record.text or "" for record in baseline.responses}
            self.evaluator.histories = said
        share = list(enumerate(benchmark.prompts))[self.world.rank :: self.world.size]
        bar = tqdm(share, desc=benchmark.name, unit="prompt", disable=not self.world.is_main, leave=False)
        return [answer for index, prompt in bar for answer in self.evaluator.answers(index, prompt)]

    def _audited(self, answers: list[Answer], baseline: Result | None) -> list[ResponseRecord]:
        if baseline is None:
            return [answer.record for answer in answers]
        expected = {(record.index, record.turn): record.output_ids for record in baseline.responses}
        return [
            self.evaluator.audit(answer, expected.get((answer.record.index, answer.record.turn))) for answer in answers
        ]

    def _gather(self, records: list[ResponseRecord]) -> list[ResponseRecord]:
        return [record for part in self.world.gather(records) for record in part]


def _check_ids(benchmarks: Sequence[Benchmark], rows: int) -> None:
    for benchmark in benchmarks:
        for prompt in benchmark.prompts:
            if prompt.prompt_ids and max(prompt.prompt_ids) >= rows:
                raise UserError(
                    f"row {prompt.row} of {benchmark.name} holds the token id {max(prompt.prompt_ids)}, the target "
                    f"knows 0 to {rows - 1}; give prompts made with its own tokenizer"
                )


def _dataset(benchmark: Benchmark) -> Dataset:
    return Dataset(
        name=benchmark.name,
        hub_id=benchmark.hub_id,
        config=benchmark.config,
        split=benchmark.split,
        revision=benchmark.revision,
        total_rows=benchmark.total_rows,
        selected_rows=[prompt.row for prompt in benchmark.prompts],
    )
