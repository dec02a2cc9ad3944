"""Drafters without weights: they propose from a script, so that the loop can be tested against plain greedy."""

import random

from dloop.hosts.host import Segment


class TreeSegment(Segment):
    """A chain plus random side branches, some of which may be right by accident."""

    def __init__(self, chain, log_probs, branches):
        super().__init__(chain, log_probs)
        object.__setattr__(self, "branches", branches)

    def subtree(self, budget, whole_chain=False):
        tokens, parents = super().subtree(0)
        for parent, token in self.branches[: max(budget - len(self.chain), 0)]:
            if all(parents[i] != parent or tokens[i] != token for i in range(len(tokens))):
                tokens, parents = [*tokens, token], [*parents, parent]
        return tokens, parents


class ScriptedDrafter:
    """Drafts what the target will say, spoilt at random places; also checks the order of the calls."""

    def __init__(self, continuation, length, vocabulary, seed, accuracy=0.8):
        self.continuation, self.stage_length, self.vocabulary = continuation, length, vocabulary
        self.random, self.accuracy = random.Random(seed), accuracy
        self.features = []

    def reset(self, capacity):
        self.place, self.features = 0, []

    def begin(self, features, tokens):
        assert self.continuation[self.place] == tokens[-1]
        assert len(tokens) == len(features)
        self.features.append(features)
        self.drafted = self.place

    def _stage(self):
        right = self.continuation[self.drafted + 1 : self.drafted + 1 + self.stage_length]
        right += [0] * (self.stage_length - len(right))
        chain = [t if self.random.random() < self.accuracy else self.random.randrange(self.vocabulary) for t in right]
        self.drafted += len(chain)
        branches = [
            (self.random.randrange(-1, self.stage_length), token)
            for token in self.random.choices([*right, *range(self.vocabulary)], k=12)
        ]
        return TreeSegment(chain, [self.random.uniform(-0.4, 0.0) for _ in chain], branches)

    first_stage = next_stage = _stage

    def end(self):
        pass

    def committed(self, count):
        self.place += count
