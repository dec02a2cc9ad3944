"""Our grouped attention in the library's registry, for targets that only the library's own forward computes.

Under a mask the library copies keys and values to every query head in each layer; here the heads of one group are more
query rows of the same keys. Shape letters: H heads, G key/value heads, Q queries, K keys, E head dimension.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "dloop_grouped"


def share_keys(model: PreTrainedModel) -> None:
    """Let `model` attend this way wherever there is a mask and one sequence; elsewhere as with "sdpa"."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def attend(
    module: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, Q, H, E] of queries [1, H, Q, E], keys and values [1, G, K, E] and a mask [1, 1, Q, K]."""
    group = queries.shape[1] // keys.shape[1]
    one_mask = attention_mask is not None and attention_mask.shape[:2] == (1, 1) and len(queries) == 1
    if attention_mask is None or not one_mask or group == 1 or options.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, queries, keys, values, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    packed = queries.reshape(1, keys.shape[1], -1, queries.shape[-1])
    mask = attention_mask[0, 0, :, : keys.shape[-2]].repeat(group, 1)
    rows = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return rows.reshape(queries.shape).transpose(1, 2).contiguous(), None
