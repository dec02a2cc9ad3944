"""The demo's tokenizer: a byte-pair encoding of 1024 tokens, trained on the demo's own conversations.

In: a conversations file. Out: a Hugging Face folder that `AutoTokenizer` opens, with the four special tokens and the
chat template of `--chat-template qwen` (headers and end of turn as Qwen's, but no think block: the demo's target does
not think, whatever `enable_thinking` says). Knows nothing about the domains.

    python -m dloop.demo.tokenizer --corpus D/target_train.jsonl --output-dir T
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from dloop.cli import UserError, parse, run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024
END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
PIECES = r"\d{1,2}| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+(?=\S)|\s+"
"""What a merge may not cross: a number below 100, a word or a run of punctuation (each with one space before it), white
space. The demo's texts have no larger numbers, and a number of one token is copied in one step."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train the demo's tokenizer."""

    corpus: Path
    """Conversations file (JSON lines) to learn the merges from."""
    output_dir: Path
    """Folder of the tokenizer; replaced when it exists."""
    conversations: int = 6000
    """How many conversations to read."""


def texts(corpus: Path) -> Iterator[str]:
    """One text a conversation: roles and contents of its messages, in the order of the file."""
    from dloop.data.conversations import RowError, iter_lines, normalise, parse_row

    for number, line in iter_lines(corpus):
        try:
            messages = normalise(parse_row(line))
        except RowError as error:
            raise UserError(f"{corpus}, line {number + 1}: {error}; the demo's corpus has no such rows") from error
        yield "\n".join(f"{message['role']}\n{message['content']}" for message in messages)


def train_tokenizer(samples: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `samples`; end of sequence is the end of a turn, padding the end of text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = [END_OF_TEXT, TURN_START, TURN_END, MASK]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # So often that every number below 100 becomes a token, however rare it is in the samples.
    numbers = ["\n".join(map(str, range(100)))] * 1000
    tokenizer.train_from_iterator(chain(numbers, samples), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        extra_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def main() -> None:
    """Command line."""
    from dloop.results.atomic import replacing_folder

    options = parse(Options)
    tokenizer = train_tokenizer(islice(texts(options.corpus), options.conversations))
    with replacing_folder(options.output_dir) as folder:
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    run(main)
