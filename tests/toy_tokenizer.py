"""A small fast tokenizer with Qwen3's special tokens and message format, built in code, without files.

The vocabulary is byte-level BPE learned from a few sentences, so real texts split into several tokens and
line breaks merge across message borders as they do in large vocabularies.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

CHAT_TEMPLATE = """
{%- set seek = namespace(query=messages|length - 1, open=true) -%}
{%- for turn in messages|reverse -%}
  {%- set text = turn.content if turn.content is string else '' -%}
  {%- set wrapped = text.startswith('<tool_response>') and text.endswith('</tool_response>') -%}
  {%- if seek.open and turn.role == 'user' and not wrapped -%}
    {%- set seek.query = messages|length - loop.index -%}
    {%- set seek.open = false -%}
  {%- endif -%}
{%- endfor -%}
{%- for turn in messages -%}
  {%- set text = turn.content if turn.content is string else '' -%}
  {%- if turn.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
      {{- '<|im_start|>user' -}}
    {%- endif -%}
    {{- '\\n<tool_response>\\n' ~ text ~ '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
      {{- '<|im_end|>\\n' -}}
    {%- endif -%}
  {%- elif turn.role == 'assistant' -%}
    {%- set answer = namespace(thought='', text=text) -%}
    {%- if turn.reasoning_content is string -%}
      {%- set answer.thought = turn.reasoning_content.strip('\\n') -%}
    {%- elif '</think>' in text -%}
      {%- set answer.thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
      {%- set answer.text = text.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {%- if loop.index0 > seek.query and (loop.last or answer.thought) -%}
      {%- set answer.text =
            '<think>\\n' ~ answer.thought ~ '\\n</think>\\n\\n' ~ answer.text.lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' ~ answer.text ~ '<|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' ~ turn.role ~ '\\n' ~ text ~ '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""

_SENTENCES = [
    "system\nYou are a helpful assistant.",
    "user\nHow many apples are left in the basket?\n\nShe sold 12 of the 40 apples to her neighbour.",
    "assistant\n\nThe answer is 28.\n\nThere were 40 apples, and 40 - 12 = 28 of them are left.\n",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
]
_WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"


def toy_tokenizer(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A fresh tokenizer: at most `vocab_size` BPE tokens, then the special tokens, then the markers."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_SENTENCES * 3, trainer)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=131072,
    )
