"""How much a speedup would move with other prompts of the same kind: paired resampling of the responses.

It sees the choice of prompts and the jitter between responses; it cannot see a load that differed between the two
runs. The same responses are drawn for every row of a benchmark, so that a gain between two rows is paired as well.
"""

import zlib
from statistics import fmean

import numpy as np

from dloop.results.metrics import Records

DRAWS = 1000


def resampled_speedups(method: Records, baseline: Records, benchmark: str) -> np.ndarray:
    """Speedups [DRAWS] of resampled responses; NaN without a common response that has a round.

    A response is drawn together with the baseline's answer to the same prompt.
    """
    reference = {(part.index, part.turn): part.tpot for part in baseline if part.acceptance_lengths}
    pairs = [
        (reference[part.index, part.turn], part.tpot)
        for part in method
        if part.acceptance_lengths and (part.index, part.turn) in reference
    ]
    if not pairs:
        return np.full(DRAWS, np.nan)
    means = np.asarray(pairs)[_picks(len(pairs), benchmark)].mean(axis=1)
    return means[:, 0] / means[:, 1]


def resampled_taus(method: Records, benchmark: str) -> np.ndarray:
    """Mean acceptance lengths [DRAWS] of resampled responses; NaN without a response that has a round."""
    taus = [fmean(part.acceptance_lengths) for part in method if part.acceptance_lengths]
    return np.asarray(taus)[_picks(len(taus), benchmark)].mean(axis=1) if taus else np.full(DRAWS, np.nan)


def _picks(count: int, benchmark: str) -> np.ndarray:
    # The seed comes from the benchmark: alike for the rows of one, unlike for the benchmarks of an average.
    return np.random.default_rng(zlib.crc32(benchmark.encode())).integers(count, size=(DRAWS, count))


def interval(draws: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of resampled numbers."""
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)
