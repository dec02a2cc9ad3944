r"""The demo's target: a tiny model trained on the demo's corpus in minutes on two CPU cores.

In: conversations and the demo's tokenizer. Out: a complete Hugging Face folder (weights, generation settings,
tokenizer) with `training.json`, what it cost and what it learnt. A killed run goes on where it was; a target that has
learnt too little is refused, because no draft could be accepted on it. Knows no draft.

    python -m dloop.demo.tiny_target --corpus D/target_train.jsonl --heldout D/heldout.jsonl \
        --tokenizer T --output-dir M
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dloop.cli import UserError, parse, run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dloop.demo.target_training import Progress, Recipe, Row

MAX_LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train the demo's target."""

    corpus: Path
    """Conversations to learn, as JSON lines."""
    heldout: Path
    """Other conversations, to judge the target."""
    tokenizer: Path
    """The demo's tokenizer, a folder."""
    output_dir: Path
    """Folder of the finished target; replaced when it exists."""
    architecture: Literal["qwen3", "qwen3.5", "gemma4"] = "qwen3"
    """What the target is built like."""
    steps: int = 1800
    """Optimizer steps."""
    batch_size: int = 4
    """Conversations a step."""
    muon_rate: float = 0.02
    """Peak learning rate of the layers' matrices."""
    adamw_rate: float = 8e-3
    """Peak learning rate of embedding and norms."""
    save_interval: int = 100
    """Steps between two states that a killed run can go on from."""
    seed: int = 0
    """Seed of the weights and of the order."""
    check_quality: bool = True
    """Refuse a target that has learnt too little."""


def read_rows(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """All conversations of a file, tokenised as for `--chat-template qwen --system-prompt ""`."""
    import torch

    from dloop.data.chat_template import find_template
    from dloop.data.conversations import RowError, iter_lines, normalise, parse_row
    from dloop.data.loss_mask import Encoder
    from dloop.demo.target_training import Row

    encode = Encoder(tokenizer=tokenizer, template=find_template("qwen"), max_length=MAX_LENGTH, system_prompt="")
    rows = []
    for number, line in iter_lines(path):
        try:
            source = parse_row(line)
            encoded = encode(normalise(source))
        except RowError as error:
            raise UserError(f"{path}, line {number + 1}: {error}; make the corpus again") from error
        domain = str(source.get("id", "")).split("/")[0]
        rows.append(Row(domain, torch.tensor(encoded.input_ids), torch.tensor(encoded.loss_mask).bool()))
    if not rows:
        raise UserError(f"{path} holds no conversation; make the corpus again")
    return rows


def recipe_of(options: Options) -> Recipe:
    """The settings and the content that the result depends on."""
    from dloop.demo.target_training import Recipe

    digest = hashlib.sha256(options.corpus.read_bytes())
    digest.update((options.tokenizer / "tokenizer.json").read_bytes())
    return Recipe(
        architecture=options.architecture,
        steps=options.steps,
        batch_size=options.batch_size,
        muon_rate=options.muon_rate,
        adamw_rate=options.adamw_rate,
        seed=options.seed,
        data=digest.hexdigest(),
    )


def write_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    facts: dict[str, Any],
    folder: Path,
    architecture: str = "qwen3",
) -> None:
    """The finished folder, whole or not at all; generation stops at the end of a turn or of the text."""
    from transformers import GenerationConfig

    from dloop.demo.architectures import ARCHITECTURES
    from dloop.results.atomic import replacing_folder, write_json

    stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    with replacing_folder(folder) as fresh:
        ARCHITECTURES[architecture].save(model, fresh)
        tokenizer.save_pretrained(fresh)
        write_json(fresh / "training.json", facts)


def describe(recipe: Recipe, progress: Progress, quality: dict[str, Any]) -> dict[str, Any]:
    """What `training.json` says: settings, cost, loss by interval, held-out quality."""
    return {
        "recipe": asdict(recipe),
        "padded_tokens": progress.tokens,
        "cpu_seconds": round(progress.cpu_seconds, 1),
        "losses": [[step, round(loss, 4)] for step, loss in progress.losses],
        "heldout": quality,
    }


def train_target(options: Options) -> None:
    """Train, judge and write the target that `options` describe."""
    from dloop.demo.architectures import new_target
    from dloop.demo.target_quality import is_enough, measure, report
    from dloop.demo.target_training import Run
    from dloop.hosts.target_model import load_tokenizer

    recipe = recipe_of(options)
    tokenizer = load_tokenizer(str(options.tokenizer))
    heldout = read_rows(options.heldout, tokenizer)
    special = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    model = new_target(options.architecture, len(tokenizer), **special, seed=options.seed)
    state = options.output_dir.with_name(f".{options.output_dir.name}.training")
    progress = Run(model, read_rows(options.corpus, tokenizer), recipe, state).train(options.save_interval)
    qualities = measure(model, heldout)
    quality = report(qualities)
    print(f"held-out loss {quality['loss']}, exact code answers {quality['exact_code']:.0%}")
    if options.check_quality and not is_enough(qualities):
        raise UserError(
            f"the target has learnt too little (held-out loss {quality['loss']}, exact code answers "
            f"{quality['exact_code']:.0%}): drafts need a loss below 0.1 or half of the code answers exact; "
            f"give it more --steps"
        )
    write_target(model, tokenizer, describe(recipe, progress, quality), options.output_dir, options.architecture)
    shutil.rmtree(state)


def main() -> None:
    """Command line."""
    options = parse(Options)
    if min(options.steps, options.batch_size, options.save_interval) < 1:
        raise UserError("--steps, --batch-size and --save-interval must be 1 or more")
    train_target(options)


if __name__ == "__main__":
    run(main)
