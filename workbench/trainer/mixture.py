"""Which of several sources feeds each sample of an endless stream, by weight, and how far each has come by then.

Samples are dealt in blocks of 1024. Every block holds exactly its share of each source, in an order of its own, given
by the seed and the block's number; so the source of any sample, and how many each source has given before it, follow
from the sample's number alone, and over any stretch the shares are right to within one block. The k-th sample of a
source is the same whatever the weights. Knows numbers; nothing of corpora, rows or files.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..errors import DataError
from .permutation import mix, permute

BLOCK = 1024
_KEPT = 4  # blocks whose tables are kept
_ODD = 0xD1342543DE82EF95  # a multiplier of M. Steele and S. Vigna, "Computationally easy, spectrally good multipliers"


def derived_seed(seed: int, number: int) -> int:
    """A seed of its own for each source, from the stream's; that of source 0 is the stream's."""
    if number == 0:
        return seed
    words = np.array([(seed ^ (number * _ODD)) % 2**64], np.uint64)
    return int(mix(words)[0])


class Mixture:
    """See the module's docstring.

    Args:
        weights: one a source, above 0; only their ratios count, to the nearest 1/1024.
        seed: of the stream.

    Attributes:
        counts: samples of each source in a block.

    Raises:
        DataError: a weight is no number above 0, or so small that a block has no sample of its source.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        for number, weight in enumerate(weights):
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise DataError(f"The weight of corpus {number} is {weight!r}; expected a number above 0; correct it.")
        if not math.isfinite(sum(weights)):
            raise DataError("The weights of the corpora add up to more than a number can be; divide them all alike.")
        exact = np.array(weights, np.float64) / sum(weights) * BLOCK
        counts = np.floor(exact).astype(np.int64)
        rest = np.argsort(-(exact - counts), kind="stable")[: BLOCK - int(counts.sum())]
        counts[rest] += 1  # the largest remainders
        if (none := np.flatnonzero(counts == 0)).size:
            number = int(none[0])
            raise DataError(
                f"The weight of corpus {number}, {weights[number]:g} of {sum(weights):g}, is less than half of "
                f"1/{BLOCK}, and no row would ever come from it; leave the corpus out, or give it more."
            )
        self.counts: list[int] = counts.tolist()
        self._ends = np.cumsum(counts)
        self._seed = derived_seed(seed, 2**32)  # no source's
        self._tables: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def places(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, int64, and which of that source's own samples it is, uint64 from 0.

        Args:
            samples: (n,) uint64, numbers from 0.
        """
        blocks, within = (samples // np.uint64(BLOCK)).tolist(), (samples % np.uint64(BLOCK)).tolist()
        found = [(block, *self._entry(block, place)) for block, place in zip(blocks, within, strict=True)]
        sources = np.array([source for _, source, _ in found], np.int64)
        positions = np.array([block * self.counts[source] + rank for block, source, rank in found], np.uint64)
        return sources, positions

    def given(self, samples: int) -> list[int]:
        """How many samples each source has given before sample number `samples`."""
        block, place = divmod(samples, BLOCK)
        own = self._table(block)[0][:place]
        inside = np.bincount(own, minlength=len(self.counts)).tolist()
        return [block * count + more for count, more in zip(self.counts, inside, strict=True)]

    def _entry(self, block: int, place: int) -> tuple[int, int]:
        sources, ranks = self._table(block)
        return int(sources[place]), int(ranks[place])

    def _table(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each place in a block, and how many places before it are of the same source."""
        if block not in self._tables:
            numbers = np.full(BLOCK, block, np.uint64)
            slots = permute(np.arange(BLOCK, dtype=np.uint64), numbers, self._seed, BLOCK).astype(np.int64)
            sources = np.searchsorted(self._ends, slots, side="right")
            ranks = np.empty(BLOCK, np.int64)
            for source, count in enumerate(self.counts):
                ranks[sources == source] = np.arange(count)
            self._tables[block] = sources, ranks
            if len(self._tables) > _KEPT:
                self._tables.popitem(last=False)
        return self._tables[block]
