"""What each step takes from the corpora: windows of tokens, in an order that any step can be drawn from again.

The stream is a pure function of (corpora, batch, ctx, seed, ranges, weights, alterations) and of the step number, so
any step's batch can be drawn again in constant time, and the cursor is a few numbers. Knows nothing of models, runs or
MLX.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError
from ..sabotage.alterations import SAMPLE_LIMIT, Alterations, Relabelling, Repetition, Substitution, integer
from .corpus import Corpus
from .mixture import Mixture, derived_seed
from .permutation import epoch_keys, mix, permute

Batch = tuple[np.ndarray, np.ndarray]  # inputs, targets: each int32 (batch, ctx)


class Row(NamedTuple):
    """Where one row of a batch comes from: `ctx + 1` tokens at `offset` of `sources[source]`.

    `epoch` and `index` are those of the sample that the row consumes, also where a substitution took its place.
    """

    source: int
    offset: int
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no row needs


class _Feed:
    """The consecutive, non-overlapping windows of a range of tokens, epoch after epoch; see `WindowSampler`."""

    def __init__(self, corpus: Corpus, start: int, stop: int | None, ctx: int, seed: int, rows: int) -> None:
        self.corpus, self.ctx, self.seed = corpus, ctx, seed
        self.start, self.stop = _range(corpus, start, stop)
        length = self.stop - self.start
        # One window fewer than fits, where that can be spared: then every phase from 0 to ctx - 1 has room.
        self.windows = max(1, (length - ctx) // ctx)  # windows an epoch
        self._phases = min(ctx, length - self.windows * ctx)
        if self._phases < 1 or self.windows < rows:
            raise DataError(
                f"The training range of {corpus.path}, tokens {self.start} to {self.stop}, has {length} "
                f"tokens; expected at least {_tokens_needed(rows, ctx)} for a batch of {rows} windows of {ctx} + 1 "
                "tokens; use a longer corpus or range, or a smaller batch or ctx."
            )

    def windows_at(self, samples: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """Offset, epoch and index of samples of this feed, (n,) uint64 from 0."""
        size = np.uint64(self.windows)
        epochs, indices = samples // size, samples % size
        # The rounds of the permutation use the key plus 1, 2, ... constants; the phase uses the key plus none.
        phases = mix(epoch_keys(epochs, self.seed)) % np.uint64(self._phases)
        offsets = permute(indices, epochs, self.seed, self.windows) * np.uint64(self.ctx) + phases
        return [self.start + offset for offset in offsets.tolist()], epochs.tolist(), indices.tolist()


class WindowSampler:
    """An endless stream of (inputs, targets), each int32 (batch, ctx); targets are the inputs shifted by one token.

    An epoch takes the consecutive, non-overlapping windows of `sources[0].tokens[start:stop]`, each exactly once, in
    an order given by (seed, epoch). Windows of an epoch start at a phase of 0 .. ctx - 1 tokens, given by the same
    two, so that epochs cut the text at different places; fewer than 2 * ctx tokens are left out, at the ends. A batch
    may take its last rows from the next epoch. With weights several sources do so, each in epochs of its own, and
    `Mixture` says from which a row comes.

    Args:
        sources: the corpora; the first feeds ordinary windows (with weights: as many as there are weights), the others
            only substitutions.
        batch: rows a step.
        ctx: tokens a row.
        seed: from 0 to 2**64 - 1.
        start, stop: the training range, in tokens of `sources[0]`; `stop` None is its end.
        weights: how often rows come from each source, up to a factor; None: all from the first.
        stops: with weights, the end of the training range of each source; None: all of them.
        substitutions, relabellings, repetitions: see `alterations`. They are part of what the data of the run is.
        skipped: numbers of batches that no step consumes: the next one comes in its place.

    Raises:
        DataError: an argument is out of range, two alterations want the same row, or a range is too short to fill the
            rows of one batch with different windows.
    """

    def __init__(
        self,
        sources: Sequence[Corpus],
        batch: int,
        ctx: int,
        seed: int,
        *,
        start: int = 0,
        stop: int | None = None,
        weights: Sequence[float] | None = None,
        stops: Sequence[int | None] | None = None,
        substitutions: Sequence[Substitution] = (),
        relabellings: Sequence[Relabelling] = (),
        repetitions: Sequence[Repetition] = (),
        skipped: Sequence[int] = (),
    ):
        self.sources = tuple(sources)
        if not self.sources:
            raise DataError("The sampler has no sources; expected at least one corpus; pass [Corpus.open(path)].")
        self.batch = integer("batch", batch, 1, 2**31)
        self.ctx = integer("ctx", ctx, 1, 2**31)
        self.seed = integer("seed", seed, 0, 2**64)
        self.mixture = None if weights is None else _mixed(self.sources, weights, self.seed)
        rows = [self.batch] if self.mixture is None else [min(self.batch, count) for count in self.mixture.counts]
        ends = [stop] if self.mixture is None else list(stops or [None] * len(rows))
        self.feeds = [
            _Feed(corpus, 0 if number else start, end, self.ctx, derived_seed(self.seed, number), least)
            for number, (corpus, end, least) in enumerate(zip(self.sources, ends, rows, strict=False))
        ]
        first = self.feeds[0]
        self.start, self.stop, self.windows = first.start, first.stop, first.windows
        self._altered = Alterations(
            substitutions,
            relabellings,
            repetitions,
            skipped,
            lengths=[(len(source), source.path) for source in self.sources],
            batch=self.batch,
            ctx=self.ctx,
        )
        self._number = 1  # of the batch that comes next, unless it is skipped

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        step = self.step
        batch = self.batch_at(step)
        self._number = self._altered.number_of(step) + 1
        return batch

    @property
    def step(self) -> int:
        """The step whose batch comes next, counted from 1."""
        return self._altered.step_of(self._number)

    def number(self, step: int) -> int:
        """The number that the batch of `step` has in the ordinary stream, which skips none. DataError if no step."""
        return self._altered.number_of(self._valid(step))

    def seek(self, step: int) -> None:
        """Make the batch of `step` (counted from 1) the next one, in constant time. DataError if it is no step."""
        before = self._valid(step) - 1
        self._number = self._altered.number_of(before) + 1 if before else 1

    def _valid(self, step: int) -> int:
        return integer("step", step, 1, SAMPLE_LIMIT // self.batch)

    def state_dict(self) -> dict[str, Any]:
        """The cursor, after the batches consumed so far: the sample that comes next, by seed, epoch and index. Of a
        mixture: seed, the sample's number, and epoch and index of the window that comes next from each source."""
        samples = (self._number - 1) * self.batch
        if self.mixture is not None:
            return {"seed": self.seed, "sample": samples, "sources": self._positions(samples)}
        epoch, index = divmod(samples, self.windows)
        return {"seed": self.seed, "epoch": epoch, "index": index}

    def _positions(self, samples: int) -> list[dict[str, int]]:
        """Where each source of a mixture stands before a sample."""
        assert self.mixture is not None
        given = zip(self.mixture.given(samples), self.feeds, strict=True)
        return [dict(zip(("epoch", "index"), divmod(count, feed.windows), strict=True)) for count, feed in given]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` said. DataError, with the cursor unmoved, for one that is not this stream's."""
        keys = {"seed", "epoch", "index"} if self.mixture is None else {"seed", "sample", "sources"}
        if not isinstance(state, dict) or state.keys() != keys:
            found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise DataError(
                f"The cursor has the keys {found}; expected {sorted(keys)}; load one that a WindowSampler saved"
                f"{' of several corpora' if self.mixture is not None else ''}."
            )
        seed = integer("The cursor's seed", state["seed"], 0, 2**64)
        if seed != self.seed:
            raise DataError(
                f"The cursor's seed is {seed}; expected {self.seed}, this sampler's; "
                "build the sampler with the seed of the run."
            )
        if self.mixture is not None:
            self._number = self._valid(self._mixed_number(state) + 1)
            return
        epoch = integer("The cursor's epoch", state["epoch"], 0, SAMPLE_LIMIT // self.windows)
        index = integer("The cursor's index", state["index"], 0, self.windows)
        number, row = divmod(epoch * self.windows + index, self.batch)
        if row:
            raise DataError(
                f"The cursor's epoch {epoch} and index {index} stand before row {row} of a batch; expected row 0 with "
                f"batch {self.batch} and {self.windows} windows an epoch; build the sampler with the run's batch, ctx "
                "and range."
            )
        self._number = self._valid(number + 1)

    def _mixed_number(self, state: dict[str, Any]) -> int:
        """Batches before a mixture's cursor."""
        samples = integer("The cursor's sample", state["sample"], 0, SAMPLE_LIMIT)
        number, row = divmod(samples, self.batch)
        if row:
            raise DataError(
                f"The cursor's sample {samples} is row {row} of a batch; expected row 0 with batch {self.batch}; build "
                "the sampler with the run's batch."
            )
        expected = self._positions(samples)
        if state["sources"] != expected:
            raise DataError(
                f"The cursor has the sources at {state['sources']}; expected {expected} after {samples} samples; build "
                "the sampler with the run's corpora, weights, ctx and ranges."
            )
        return number

    def provenance(self, step: int) -> list[Row]:
        """Where each row of the batch of `step` comes from. Leaves the cursor where it is. DataError if no step."""
        number = self._altered.number_of(self._valid(step))
        rows = self._ordinary(self._altered.origin_of(number))
        for row, (source, offset) in self._altered.substituted(number).items():
            rows[row] = rows[row]._replace(source=source, offset=offset)
        if self._altered.origin_of(number) == number:
            return rows
        own = self._ordinary(number)
        return [row._replace(epoch=mine.epoch, index=mine.index) for row, mine in zip(rows, own, strict=True)]

    def _ordinary(self, number: int) -> list[Row]:
        samples = np.arange(self.batch, dtype=np.uint64) + np.uint64((number - 1) * self.batch)
        if self.mixture is None:
            sources, positions = np.zeros(self.batch, np.int64), samples
        else:
            sources, positions = self.mixture.places(samples)
        rows: dict[int, Row] = {}
        for source, feed in enumerate(self.feeds):
            own = np.flatnonzero(sources == source)
            if own.size:
                columns = zip(own.tolist(), *feed.windows_at(positions[own]), strict=True)
                rows |= {row: Row(source, offset, epoch, index) for row, offset, epoch, index in columns}
        return [rows[row] for row in range(self.batch)]

    def batch_at(self, step: int) -> Batch:
        """The batch of `step`, counted from 1. Leaves the cursor where it is. DataError if it is no step."""
        rows = self.provenance(step)
        inputs, targets = _cut([self.sources[row.source] for row in rows], [row.offset for row in rows], self.ctx)
        self._altered.relabel(self._altered.number_of(step), targets)
        return inputs, targets


def _mixed(sources: Sequence[Corpus], weights: Sequence[float], seed: int) -> Mixture:
    """The mixture of the first sources. DataError: there are fewer of them, or they hold tokens of different kinds."""
    if not 1 <= len(weights) <= len(sources):
        raise DataError(f"There are {len(weights)} weights for {len(sources)} corpora; expected one for each.")
    for corpus in sources[1 : len(weights)]:
        if corpus.kind != sources[0].kind:
            raise DataError(
                f"{corpus.path} holds {corpus.kind} and {sources[0].path} {sources[0].kind}; expected corpora of one "
                "kind to mix; convert one of them."
            )
    return Mixture(weights, seed)


def _range(corpus: Corpus, start: int, stop: int | None) -> tuple[int, int]:
    """`start` and `stop` in tokens of the corpus, checked; None is its end."""
    stop = integer(f"The stop in {corpus.path}", len(corpus) if stop is None else stop, 1, len(corpus) + 1)
    return integer(f"The start in {corpus.path}", start, 0, stop), stop


def _tokens_needed(batch: int, ctx: int) -> int:
    """The shortest range from which an epoch takes at least `batch` windows."""
    return ctx + 1 if batch == 1 else (batch + 1) * ctx


def _cut(corpora: Sequence[Corpus], offsets: Sequence[int], ctx: int) -> Batch:
    windows = np.empty((len(offsets), ctx + 1), np.int32)
    for window, corpus, offset in zip(windows, corpora, offsets, strict=True):
        window[:] = corpus.tokens[offset : offset + ctx + 1]
    return windows[:, :-1].copy(), windows[:, 1:].copy()  # copies: contiguous, and neither changes with the other


def split_point(length: int, val_split: float, ctx: int) -> int:
    """The token at which the held-out tail of a corpus of `length` tokens begins: `length` when `val_split` is 0.

    `val_split` is the tail's share, 0 <= val_split < 1. Raises DataError for any other value, or when a part that is
    wanted cannot hold one window of ctx + 1 tokens.
    """
    if isinstance(val_split, bool) or not isinstance(val_split, int | float) or not 0 <= val_split < 1:
        raise DataError(f"val_split is {val_split!r}; expected the tail's share, from 0 to below 1; correct it.")
    tail = int(length * val_split)
    for name, tokens in (("training part", length - tail), ("held-out tail", tail)):
        if tokens < ctx + 1 and (val_split or name == "training part"):
            raise DataError(
                f"The {name} of a corpus of {length} tokens has {tokens} with val_split {val_split}; expected at least "
                f"{ctx + 1}, one window; change val_split, or use a longer corpus or a smaller ctx."
            )
    return length - tail


def training_windows(
    corpora: Sequence[Corpus],
    *,
    batch: int,
    ctx: int,
    seed: int,
    val_split: float,
    weights: Sequence[float] = (),
    substitutions: Sequence[Substitution] = (),
    relabellings: Sequence[Relabelling] = (),
    repetitions: Sequence[Repetition] = (),
    skipped: Sequence[int] = (),
) -> WindowSampler:
    """The stream of the built-in trainer: windows of the first corpus up to its held-out tail, or of as many as there
    are weights, each up to its own. Raises DataError."""
    stops = [split_point(len(corpus), val_split, ctx) for corpus in corpora[: max(1, len(weights))]]
    return WindowSampler(
        corpora,
        batch,
        ctx,
        seed,
        stop=stops[0],
        weights=weights or None,
        stops=stops,
        substitutions=substitutions,
        relabellings=relabellings,
        repetitions=repetitions,
        skipped=skipped,
    )


def validation_batches(corpus: Corpus, batch: int, ctx: int, start: int, stop: int | None, limit: int) -> list[Batch]:
    """At most `limit` full batches (inputs, targets), each int32 (batch, ctx), of `corpus.tokens[start:stop]`.

    Always the same ones: non-overlapping windows spread evenly over the range, in file order. Raises DataError when
    an argument is out of range or the range cannot fill one batch.
    """
    batch = integer("batch", batch, 1, 2**31)
    ctx = integer("ctx", ctx, 1, 2**31)
    limit = integer("limit", limit, 1, 2**31)
    start, stop = _range(corpus, start, stop)
    windows = (stop - start - 1) // ctx
    count = min(limit, windows // batch) * batch
    if count == 0:
        raise DataError(
            f"The held-out range of {corpus.path}, tokens {start} to {stop}, has {stop - start} tokens; expected at "
            f"least {batch * ctx + 1} for a batch of {batch} windows of {ctx} + 1 tokens; hold out more, or use a "
            "smaller batch or ctx."
        )
    offsets = [start + ctx * (i * windows // count) for i in range(count)]
    return [_cut([corpus] * batch, offsets[i : i + batch], ctx) for i in range(0, count, batch)]
