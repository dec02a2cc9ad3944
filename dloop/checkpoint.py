"""What is this draft? Says in words what a checkpoint holds and whether it would load; converts and probes.

    python -m dloop.checkpoint deepseek-ai/dspark_qwen3_4b_block7
    python -m dloop.checkpoint DRAFT --convert specforge --output FOLDER
    python -m dloop.checkpoint DRAFT --convert deepspec --target Qwen/Qwen3-4B --output FOLDER
    python -m dloop.checkpoint DRAFT --probe --target Qwen/Qwen3-4B --data conversations.jsonl

Reads configuration and tensors; the target is only loaded for what needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dloop.cli import UserError, parse, run

if TYPE_CHECKING:
    import torch

    from dloop.hosts.host import Host


@dataclass(frozen=True, kw_only=True)
class Options:
    """Describe, convert or probe a draft checkpoint."""

    draft: Annotated[str, tyro.conf.Positional]
    """Folder or hub repository."""
    revision: str | None = None
    """Revision on the hub."""
    convert: Literal["specforge", "deepspec"] | None = None
    """Write a DSpark draft in this flavour."""
    output: Path | None = None
    """Folder that --convert writes."""
    probe: bool = False
    """Measure loop-stage accuracy under each reading of the loop state: the best is what it was trained with."""
    target: str | None = None
    """The target, for --probe and for --convert deepspec (which carries its embedding and head)."""
    data: Path | None = None
    """Conversations, for --probe."""
    chat_template: str = "qwen"
    """How conversations are rendered, for --probe."""
    rows: int = 16
    """Conversations --probe reads."""
    device: str | None = None
    """Default: a GPU if there is one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, or `arguments` in its place."""
    options = parse(Options, arguments)
    _check(options)
    import torch

    from dloop.hosts.registry import build_host, read_checkpoint
    from dloop.training.distributed import choose_device

    device = choose_device(options.device) if options.probe else torch.device("cpu")
    config, tensors = read_checkpoint(options.draft, options.revision)
    host = build_host(config, tensors, options.draft, dtype=torch.float32, device=device)
    stored = next(iter(tensors.values())).dtype
    print(describe(host, options.draft, config, stored))
    if options.convert:
        convert(host, options, stored)
    if options.probe:
        print(probe(host, options))


def _check(options: Options) -> None:
    if (options.convert is None) != (options.output is None):
        raise UserError("--convert and --output belong together: what to write, and where")
    if options.output is not None and options.output.exists():
        raise UserError(f"{options.output} exists; choose another --output")
    if options.rows < 1:
        raise UserError(f"--rows is {options.rows}; it must be at least 1")
    if options.probe and (options.target is None or options.data is None):
        raise UserError("--probe needs --target and --data: predictions are measured on the target's states")
    if options.convert == "deepspec" and options.target is None:
        raise UserError("--convert deepspec needs --target: that flavour carries the target's embedding and head")


def describe(host: Host, source: str, raw: dict[str, Any], stored: torch.dtype) -> str:
    """Family, flavour, sizes, heads and tensors, a line each, of a draft that has loaded."""
    tensors = host.network.state_dict()
    lines = {
        "host": f"{host.name}, written as {', '.join(raw.get('architectures') or ['an unnamed class'])}",
        **host.facts(),
        "tensors": f"{len(tensors)}, {sum(tensor.numel() for tensor in tensors.values()) / 1e6:.2f} M parameters, "
        f"{str(stored).removeprefix('torch.')}",
        "loads": "yes, strictly: no tensor is missing and none is left over",
    }
    return "\n".join([source, *(f"  {name:<10} {text}" for name, text in lines.items())])


def convert(host: Host, options: Options, dtype: torch.dtype) -> None:
    """Write a DSpark draft in the asked flavour."""
    from dloop.hosts.checkpoint_files import write_checkpoint
    from dloop.hosts.dspark import COPIES, DSparkHost, deepspec_config
    from dloop.results.atomic import replacing_folder

    if not isinstance(host, DSparkHost):
        raise UserError(f"{options.draft} is a {host.name} draft; only DSpark drafts have two flavours")
    assert options.output is not None
    with replacing_folder(options.output) as folder:
        if options.convert == "specforge":
            host.save(folder, dtype)
        else:
            copies = zip(COPIES, _embedding_and_head(host, options), strict=True)
            tensors = {name: tensor.to(dtype) for name, tensor in (*host.network.state_dict().items(), *copies)}
            write_checkpoint(folder, deepspec_config(host.raw), tensors)
    print(f"written in the {options.convert} flavour: {options.output}")


def _embedding_and_head(host: Host, options: Options) -> tuple[Any, Any]:
    import torch

    from dloop.hosts.target_model import embedding, head, load_target

    assert options.target is not None
    target = load_target(options.target, dtype=torch.float32, device=torch.device("cpu"))
    host.check_target(target)
    # Tied weights are one tensor, which safetensors would refuse to store twice.
    return embedding(target).weight, head(target).weight.clone()


def probe(host: Host, options: Options) -> str:
    """Teacher-forced accuracy of loop stage 1 under each reading of the loop state, best first."""
    import torch

    from dloop.data.loader import ConversationDataset, training_loader
    from dloop.hosts.block.network import LoopState
    from dloop.hosts.host import ObjectiveOptions
    from dloop.hosts.target_model import load_target, load_tokenizer
    from dloop.training.target_pass import FrozenTarget

    assert options.target is not None
    assert options.data is not None
    network: Any = host.network
    if not hasattr(network, "loop_state"):
        raise UserError(f"{options.draft} is a {host.name} draft and no block drafter: its loop state has one reading")
    device = next(network.parameters()).device
    target = load_target(options.target, dtype=torch.float32, device=device)
    dataset = ConversationDataset(options.data, load_tokenizer(options.target), options.chat_template, 2048)
    objective = host.objective(target, ObjectiveOptions(num_anchors=64, dloop_max_stage=1))
    frozen = FrozenTarget(target, objective.taps)
    right: dict[str, list[int]] = {state.name: [0, 0] for state in LoopState}
    loader = training_loader(dataset, batch_size=1, rank=0, world_size=1, epoch=0)
    with torch.no_grad():
        for _, batch in zip(range(options.rows), loader, strict=False):
            outputs = frozen(batch, [batch.input_ids.shape[1]])
            for state in LoopState:
                network.loop_state = state
                ratios = objective(batch, outputs, 0).ratios
                for name, (numerator, denominator) in ratios.items():
                    if name.startswith("loop/accuracy/"):
                        right[state.name][0] += int(numerator)
                        right[state.name][1] += int(denominator)
    if not right["N1P1"][1]:
        raise UserError(f"{options.data}: no answer is long enough for a loop stage; give longer conversations")
    shares = sorted(((hits / total, name) for name, (hits, total) in right.items()), reverse=True)
    return "\n".join(
        [f"loop stage 1, teacher-forced, {right['N1P1'][1]} tokens:", *(f"  {name}  {s:.1%}" for s, name in shares)]
    )


if __name__ == "__main__":
    run(main)
