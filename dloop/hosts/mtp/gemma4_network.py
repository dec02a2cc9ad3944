"""The Gemma 4 assistant as a network: the library's own modules, driven row by row.

The library's forward builds masks that let every query of a longer call see everything, and reads a number from the
device for the ordered head; both are ours here. A row is one (token, hidden state) pair; rows never see each other,
they attend the target's keys and values alone. Shape letters: B batch, M rows, D the target's hidden size, H the
assistant's, V vocabulary, S target positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dloop.cli import UserError

LAYER_TYPES = ("full_attention", "sliding_attention")
SharedKV = Mapping[str, tuple[Tensor, Tensor]]
"""Keys and values [B, G, S, E] of the target's last own layer of each type, normed and rotated."""


def build(raw: dict[str, Any], dtype: torch.dtype) -> Any:
    """The library's assistant that `raw` (a `config.json`) describes, with random weights, in `dtype`."""
    import transformers

    try:
        config = transformers.AutoConfig.for_model(**raw)
        # The type is given here, not by a later cast, which would round the rotary frequencies too.
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except Exception as error:
        raise UserError(
            f"transformers {transformers.__version__} cannot build a {raw.get('model_type')} from this configuration: "
            f"{' '.join(str(error).split())} (5.23.0 never can; 5.24.0 is tested)"
        ) from error


def advance(
    assistant: Any, embeds_BMD: Tensor, hidden_BMD: Tensor, positions_BM: Tensor, kv: SharedKV, masks: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """One step of the recurrence: states [B, M, H] for the head, and what the next step takes as hidden [B, M, D].

    `embeds` are the target's own scaled embeddings; `masks` maps each layer type to a boolean [B, 1, M, S], or to None
    where one row sees all of S.
    """
    states_BMH = assistant.model(
        inputs_embeds=assistant.pre_projection(torch.cat((embeds_BMD, hidden_BMD), dim=-1)),
        attention_mask=dict(masks),
        position_ids=positions_BM,
        shared_kv_states=dict(kv),
        use_cache=False,
        # All rows are wanted. Told so by a number, some releases slice per-layer inputs that an assistant lacks.
        logits_to_keep=None,
    ).last_hidden_state
    return states_BMH, assistant.post_projection(states_BMH)


def logits(assistant: Any, states_MH: Tensor) -> Tensor:
    """Scores [M, V] of the assistant's own head; no soft cap."""
    if assistant.masked_embedding is None:
        return assistant.lm_head(states_MH)
    return _ordered_logits(assistant.masked_embedding, states_MH, assistant.lm_head.weight)


def _ordered_logits(order: Any, states_MH: Tensor, table_VH: Tensor) -> Tensor:
    """Scores of the tokens below the best centroids; every other token gets one less than the row's lowest of them.

    A row's filling does not depend on the rows beside it, unlike in the library, so that training rows and a single
    drafted token see the same distribution.
    """
    best = order.centroids(states_MH).topk(order.centroid_intermediate_top_k).indices
    tokens = order.token_ordering.view(order.num_centroids, -1)[best].flatten(1)
    chosen = torch.einsum("mh,mnh->mn", states_MH, table_VH[tokens])
    floor = chosen.amin(dim=-1, keepdim=True) - 1
    return floor.expand(-1, len(table_VH)).scatter(-1, tokens, chosen)
