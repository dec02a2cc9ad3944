"""Conversations to text: which turns are rendered, with which system prompt, and how a prompt is asked.

The tokenizer's own chat template does the rendering; a `ChatTemplate` adds what training has to know about it
(system default, where an answer starts and ends). It knows no token masks (`loss_mask.py`) and no files.
Try it on a file: `python -m dloop.data.check FILE --tokenizer NAME --chat-template qwen`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dloop.cli import UserError
from dloop.data.conversations import RowError, require_user

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """What training knows about a family's chat format.

    Names and defaults as in sgl-project/SpecForge:specforge/data/template.py and deepseek-ai/DeepSpec.
    """

    name: str
    system_prompt: str | None
    """Inserted where a conversation brings no system message of its own; None: nothing is inserted."""
    assistant_header: str
    """Text in front of every answer."""
    end_of_turn: str
    """Text that ends an answer; it belongs to the answer."""
    enable_thinking: bool | None = None
    """Passed to the tokenizer's template; None: not mentioned."""
    answer_prefix: str = ""
    """Put in front of every answer that lacks it."""
    unsupervised_prefix: str = ""
    """Opening of an answer that gets no loss, because at decode time it is part of the prompt."""


_EMPTY_THINK = "<think>\n\n</think>\n\n"
_EMPTY_CHANNEL = "<|channel>thought\n<channel|>"
_HELPFUL = "You are a helpful assistant."


def _chatml(name: str, system_prompt: str | None, **rest: Any) -> ChatTemplate:
    return ChatTemplate(
        name=name,
        system_prompt=system_prompt,
        assistant_header="<|im_start|>assistant\n",
        end_of_turn="<|im_end|>\n",
        **rest,
    )


TEMPLATES: dict[str, ChatTemplate] = {
    template.name: template
    for template in (
        _chatml("qwen", _HELPFUL),
        _chatml("qwen3-instruct", _HELPFUL, unsupervised_prefix=_EMPTY_THINK),
        _chatml("qwen3-thinking", _HELPFUL, enable_thinking=True),
        _chatml("qwen3.5-instruct", None, enable_thinking=False),
        ChatTemplate(
            name="gemma4",
            system_prompt=None,
            assistant_header="<|turn>model\n",
            end_of_turn="<turn|>\n",
            answer_prefix=_EMPTY_CHANNEL,
            unsupervised_prefix=_EMPTY_CHANNEL,
        ),
    )
}
"""The names `--chat-template` accepts."""


def find_template(name: str) -> ChatTemplate:
    """The registered template of that name; `UserError` if there is none."""
    if name not in TEMPLATES:
        raise UserError(f"no chat template is named {name!r}: use one of {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


@dataclass(frozen=True)
class KeptTurns:
    """The messages a conversation is rendered from, and how many it lost in front and at the end."""

    messages: list[Message]
    dropped: int
    cut: int


def kept_turns(messages: list[Message]) -> KeptTurns:
    """The system message if it comes first, then the turns from the first user turn on.

    An answer that follows neither a user nor a tool turn ends the conversation, and so does a tool turn that
    follows neither an answer nor a tool turn. Raises `RowError("no_user")`.
    """
    require_user(messages)
    system = messages[:1] if messages[0]["role"] == "system" else []
    rest = messages[len(system) :]
    first = next(index for index, message in enumerate(rest) if message["role"] == "user")
    turns = rest[first:]
    end = next((index for index in range(1, len(turns)) if _out_of_place(turns, index)), len(turns))
    return KeptTurns(system + turns[:end], dropped=first, cut=len(turns) - end)


_MAY_FOLLOW = {"assistant": ("user", "tool"), "tool": ("assistant", "tool")}


def _out_of_place(turns: list[Message], index: int) -> bool:
    allowed = _MAY_FOLLOW.get(turns[index]["role"])
    return allowed is not None and turns[index - 1]["role"] not in allowed


def training_text(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    system_prompt: str | None = None,
) -> str:
    """The text a conversation (messages as `conversations.normalise` gives them) is trained on.

    `system_prompt` replaces the template's default ("": none); a conversation's own system message wins.
    Warns where turns are left out. Raises `RowError` with `no_user` or `template_error` (the tokenizer's
    template refuses the conversation).
    """
    kept = kept_turns(messages)
    if kept.dropped:
        warnings.warn("messages in front of the first user turn are dropped", stacklevel=2)
    if kept.cut:
        warnings.warn("conversations are cut at the first turn that is out of place", stacklevel=2)
    default = template.system_prompt if system_prompt is None else system_prompt
    turns = [_with_prefix(message, template.answer_prefix) for message in kept.messages]
    if default and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": default})
    thinking = {} if template.enable_thinking is None else {"enable_thinking": template.enable_thinking}
    return _render(turns, tokenizer, add_generation_prompt=False, **thinking)


def _with_prefix(message: Message, prefix: str) -> Message:
    if message["role"] != "assistant" or message["content"].startswith(prefix):
        return message
    return message | {"content": prefix + message["content"]}


def prompt_ids(messages: list[Message], tokenizer: PreTrainedTokenizerBase, thinking: bool = False) -> list[int]:
    """Token ids that ask for the next answer; no system prompt, no special tokens beyond the template's.

    Raises `UserError` if the tokenizer's template cannot render `messages`, or opens the text twice.
    """
    try:
        text = _render(messages, tokenizer, add_generation_prompt=True, enable_thinking=thinking)
    except RowError as error:
        raise UserError(f"the tokenizer's chat template refuses a prompt: {error.__cause__}") from error
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.bos_token_id is not None and ids.count(tokenizer.bos_token_id) > 1:
        raise UserError(
            f"a prompt holds {tokenizer.bos_token!r} {ids.count(tokenizer.bos_token_id)} times, but a text "
            "begins once: remove it from the prompt or from the tokenizer's chat template"
        )
    return ids


def _render(messages: list[Message], tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, which conversations need: "
            "use the tokenizer of an instruction-tuned target"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TemplateError as error:
        raise RowError("template_error") from error
