"""Puts a stage's whole chain into its tree, because the next stage hangs below the chain's last token.

The chain displaces the least promising nodes, so the tree keeps its size. Knows any builder's nodes by their ranking.
"""

from __future__ import annotations

from collections.abc import Sequence

from dloop.trees.nodes import Nodes


def force_chain(nodes: Nodes, chain: Sequence[int], budget: int) -> Nodes:
    """The chain and the most promising other nodes, `budget` in all, or the chain alone where it is longer.

    Nodes that stay keep their order, chain nodes that were missing follow in order of depth.
    """
    spine = _walk(nodes, chain)
    on_chain = set(spine)
    others = [node for node in nodes.ranking if node not in on_chain][: max(budget - len(chain), 0)]
    kept = sorted(spine + others)
    moved = {-1: -1} | {old: new for new, old in enumerate(kept)}
    tokens = [nodes.tokens[node] for node in kept]
    parents = [moved[nodes.parents[node]] for node in kept]
    ranking = [moved[node] for node in spine]
    for token in chain[len(spine) :]:
        parents.append(ranking[-1] if ranking else -1)
        ranking.append(len(tokens))
        tokens.append(token)
    return Nodes(tokens, parents, ranking + [moved[node] for node in others])


def _walk(nodes: Nodes, chain: Sequence[int]) -> list[int]:
    """The nodes of the longest start of `chain` that is in the tree."""
    children = {edge: node for node, edge in enumerate(zip(nodes.parents, nodes.tokens, strict=True))}
    spine: list[int] = []
    for token in chain:
        node = children.get((spine[-1] if spine else -1, token))
        if node is None:
            break
        spine.append(node)
    return spine
