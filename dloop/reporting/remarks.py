"""The sentences under a table: what it was measured on, whether the answers are the target's, what to mind."""

from collections.abc import Iterable, Sequence

from dloop.reporting.collect import Collected
from dloop.reporting.measurement import HARDLY_OPENED
from dloop.reporting.noise import DRAWS
from dloop.reporting.overview import Pair
from dloop.reporting.text import percent
from dloop.results.metrics import TIE_TOLERANCE, Audit

CELLS = (
    "Each cell: speedup over autoregressive decoding / mean acceptance length τ (tokens a target forward yields). "
    "Bold: the best of a target's drafts. Avg.: plain mean of the benchmarks. Gain: speedup over the released host's."
)
INTERVAL = (
    f"The interval holds 95 % of {DRAWS} averages over resampled responses. It knows the choice of prompts and the "
    "jitter between responses, not a machine that was busier in one run than in the other."
)


def measured_on(found: Collected) -> str:
    """Device, precision, versions and limits, as stored in the results."""
    env, config = found.results[0].env, found.results[0].config
    thinking = "on" if config.get("thinking") else "off"
    return (
        f"Measured on {_machine(found)} in {env['dtype']} with {env['attn']} attention; "
        f"torch {_each(found, 'torch')}, transformers {_each(found, 'transformers')}, dloop {_each(found, 'dloop')} "
        f"(commit {_each(found, 'git')}, code {_each(found, 'code')}). "
        f"Greedy, batch 1, at most {config.get('max_new_tokens')} new tokens, thinking {thinking}."
    )


def _machine(found: Collected) -> str:
    """The device, with how many processes and threads shared it."""
    env = found.results[0].env
    threads, processes = _each(found, "torch_threads"), env["processes"]
    if env["gpu_count"]:
        return f"{env['gpu']} ({processes} GPU{'s' * (processes != 1)}, one process each)"
    share = "1 process" if processes == 1 else f"{processes} processes"
    return f"{env['gpu']} ({share} of {threads} thread{'s' * (threads != '1')})"


def _each(found: Collected, key: str) -> str:
    values = dict.fromkeys(_short(result.env[key]) for result in found.results)
    return " and ".join(values)


def _short(value: object) -> str:
    """A version as it is, a commit cut to ten digits but still `-dirty` if it was."""
    if value is None:
        return "unknown"
    commit, dirty, _ = str(value).partition("-dirty")
    return (commit[:10] if len(commit) == 40 else commit) + dirty


def lossless(audits: Iterable[Audit | None], dtype: str) -> str:
    """Whether the answers equal the baseline's, token for token; empty without anything to compare."""
    audit = sum((part for part in audits if part), Audit())
    if not audit.total:
        return ""
    if audit.identical == audit.total:
        return f"Lossless: all {audit.total} responses are, token for token, those of autoregressive decoding."
    parts = [
        (audit.identical, "are, token for token, those of autoregressive decoding"),
        (audit.tie, f"part from it at a tie (the target's two best logits within {TIE_TOLERANCE[dtype]:g})"),
        (audit.divergent, "**diverge without a tie**"),
        (audit.other_prompt, "are later turns behind an answer that already differed"),
    ]
    return f"Of {audit.total} responses " + ", ".join(f"{count} {what}" for count, what in parts if count) + "."


def hardly_opened(pairs: Sequence[Pair]) -> list[str]:
    """One sentence for every row whose gate stayed shut so often that its gain is not the loop's."""
    return [
        f"The gate hardly opened for {pair.family} on {pair.row.target}: {percent(pair.looped.open_share)} of its "
        f"rounds had an additional stage (at most {percent(HARDLY_OPENED)}), so no gain is stated."
        for pair in pairs
        if pair.hardly_opened
    ]


def modelled(found: Collected) -> str:
    """What the modelled speedup is; empty without a cost table."""
    if not found.costs:
        return ""
    beyond = found.rounds_beyond_costs
    longer = f" {beyond} rounds were longer than the cost table; its last slope was continued for them."
    return (
        "The modelled speedup charges every round the seconds of a cost table that was timed once (drafting stages, "
        "verified rows), so it is free of timing noise between runs. Rows with a tree have none."
        + longer
        * bool(beyond)
    )


def warnings(found: Collected) -> list[str]:
    """What is missing, and what differs between results and their baselines."""
    lines = [f"{text} ({count} of {len(found.measured)} results)" for text, count in found.warnings.items()]
    if found.missing:
        others = f" and {len(found.missing) - 1} more" if len(found.missing) > 1 else ""
        lines.insert(0, f"missing: {found.missing[0]}{others}")
    return lines
