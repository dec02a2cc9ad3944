"""DDTree: the most probable prefixes of a draft whose positions are independent of each other (arXiv 2604.12989).

Row d of the logits is the distribution of depth d + 1 whatever stands before it, so the probability of a prefix is a
product over depths, and the N most probable prefixes are the N-node tree of the largest expected accepted length. Knows
nothing of the draft model the logits come from. The probabilities are computed on the device and read in one packed
copy; the search is a heap over plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

import torch
from torch import Tensor

from dloop.trees.best_ids import best_ids
from dloop.trees.nodes import Nodes


def build_ddtree(
    logits_LV: Tensor, budget: int, candidates: int | None = None, normaliser_L1: Tensor | None = None
) -> Nodes:
    """The `budget` most probable prefixes under `logits_LV`, fewer when there are not that many.

    `candidates` caps the tokens tried at each depth; without it the cap is the budget, which excludes nothing.
    `normaliser_L1` is the rows' float32 log-sum-exp, where the caller has it already. Numbered
    from the most to the least probable, equally probable nodes by the ranks of their tokens from the root on.
    """
    depths, vocabulary = logits_LV.shape
    width = min(budget, vocabulary, vocabulary if candidates is None else candidates)
    if not depths or not width:
        return Nodes([], [], [])
    logits_LV = logits_LV.float()
    ids_LK = best_ids(logits_LV, width)
    if normaliser_L1 is None:
        normaliser_L1 = logits_LV.logsumexp(-1, keepdim=True)
    costs_LK = normaliser_L1 - logits_LV.gather(-1, ids_LK)
    costs, ids = torch.stack((costs_LK.double(), ids_LK.double())).flatten(1).cpu().numpy()
    # Single numbers are read through the buffer: a list of all of them takes longer to make than the search.
    places, parents = cheapest_prefixes(costs.data, depths, width, budget)
    return Nodes(ids[places].astype(int).tolist(), parents, list(range(len(places))))


def cheapest_prefixes(costs: Sequence[float], depths: int, width: int, budget: int) -> tuple[list[int], list[int]]:
    """Places (depth * width + rank, depth from 0) and parents of the `budget` prefixes of the smallest summed cost.

    `costs` [depths * width] holds negative log-probabilities, ascending within a depth. A prefix is reached once: as
    the next sibling of the one before it, or as the first child of its parent.
    """
    digit = width.bit_length()
    # Ranks as the digits of one integer, the first depth leading, order prefixes as tuples of ranks would: a prefix and
    # its extension never meet in the heap.
    steps = [1 << digit * (depths - 1 - depth) for depth in range(depths)]
    heap = [(costs[0], 0, -1, 0, 0)]
    places: list[int] = []
    parents: list[int] = []
    while heap and len(places) < budget:
        cost, ranks, parent, depth, place = heap[0]
        if (place + 1) % width:
            # The order of the two operations is part of the tree's definition, as it decides the last bit.
            sibling = cost - costs[place] + costs[place + 1]
            heapreplace(heap, (sibling, ranks + steps[depth], parent, depth, place + 1))
        else:
            heappop(heap)
        if depth + 1 < depths:
            child = (depth + 1) * width
            heappush(heap, (cost + costs[child], ranks, len(places), depth + 1, child))
        places.append(place)
        parents.append(parent)
    return places, parents
