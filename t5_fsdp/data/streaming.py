"""Training examples straight from files or the Hub, for data that is not worth preparing.

Every rank reads all rows, in the same order, and tokenizes only its own of each global batch: so
the list of global batches does not depend on the number of ranks. What a prepared split has beyond
that is given up: rows are shuffled within a buffer only, lengths are not grouped, the ranks' work
is not balanced, nothing is checked before it is reached, and a resume reads again what it skips.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np

from t5_fsdp.config import DataConfig
from t5_fsdp.data import hub
from t5_fsdp.data.batch_division import divide_batch, round_up
from t5_fsdp.data.batching import StepBatch
from t5_fsdp.data.collation import MicroBatch, SpecialIds, collate
from t5_fsdp.data.readers import BadRow, Row, read_rows
from t5_fsdp.data.rows import (
    check_columns,
    columns_of,
    empty_reason,
    has_free_columns,
    malformed,
    pair_of,
)
from t5_fsdp.data.source_files import split_files
from t5_fsdp.data.token_sums import TokenSums
from t5_fsdp.data.tokenization import Encoder, newline_id, with_prefix
from t5_fsdp.distributed import World
from t5_fsdp.errors import UserError
from t5_fsdp.seeding import numpy_generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair = tuple[str, str]

_DIGEST_ROWS = 1000
_NAME_LETTERS = 40


def stream_problem(
    data: DataConfig, micro_batch_tokens: int, width_multiple: int = 1
) -> str | None:
    """Why a stream could fail at some later row, or None."""
    longest = _longest_example(data, width_multiple)
    if longest <= micro_batch_tokens:
        return None
    return (
        f"data.streaming: examples may have {longest} tokens (data.max_source_tokens + "
        f"data.max_target_tokens), more than train.micro_batch_tokens ({micro_batch_tokens}); "
        "raise it or lower them"
    )


def _longest_example(data: DataConfig, width_multiple: int) -> int:
    source, target = data.max_source_tokens, data.max_target_tokens
    return round_up(source, width_multiple) + round_up(target, width_multiple)


def read_pairs(data: DataConfig) -> Iterator[Pair]:
    """Document and summary of each usable training row, in the order of the files.

    Raises:
        UserError: a row is malformed (under on_bad_row: strict), a column is absent, or there is
            no usable row.
    """
    columns = columns_of(data)
    usable = 0
    for place, rows in _tables(data):
        names: set[str] = set()
        for number, row in rows:
            pair = row if isinstance(row, BadRow) else pair_of(row, columns)
            if isinstance(row, dict) and row.keys() - names:
                names |= row.keys()
                if not has_free_columns(place):
                    check_columns(place, sorted(names), columns)
            if isinstance(pair, BadRow):
                if data.on_bad_row == "strict":
                    raise malformed(place, number, pair)
            elif empty_reason(*pair) is None:
                usable += 1
                yield pair
                if usable == data.max_train_examples:
                    return
        check_columns(place, sorted(names), columns)
    if not usable:
        raise UserError("the train split has no usable rows; check data.source and its files")


def _tables(data: DataConfig) -> Iterator[tuple[str, Iterator[tuple[int, Row | BadRow]]]]:
    if data.source in ("hub", "saved"):
        yield f"{data.dataset}, split {data.train_split}", hub.stream(data)
        return
    for path in split_files(data, "train"):
        yield str(path), read_rows(path)


def shuffled(pairs: Iterator[Pair], buffer_size: int, rng: np.random.Generator) -> Iterator[Pair]:
    """Each time one of the next `buffer_size` pairs at random; each pair once."""
    buffer = list(itertools.islice(pairs, buffer_size))
    for pair in pairs:
        place = int(rng.integers(len(buffer)))
        yield buffer[place]
        buffer[place] = pair
    for place in rng.permutation(len(buffer)):
        yield buffer[place]


def stream_digest(data: DataConfig) -> str:
    """What stands for the content of a stream: its options and first 1,000 pairs.

    Raises:
        UserError: as `read_pairs`.
    """
    options = [data.source, columns_of(data), data.prefix, data.max_source_tokens,
               data.max_target_tokens, data.keep_newlines, data.shuffle_buffer,
               data.max_train_examples, data.on_bad_row]  # fmt: skip
    digest = hashlib.blake2b(json.dumps(options).encode(), digest_size=32)
    for document, summary in itertools.islice(read_pairs(data), _DIGEST_ROWS):
        digest.update(json.dumps([document, summary]).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Local:
    """This rank's part of one step, before the ranks have agreed."""

    epoch: int
    next_row: int
    num_examples: int
    micro_batches: list[MicroBatch]
    names: list[list[str]]
    tokens: TokenSums
    padded_tokens: int


class StreamBatches:
    """The batches of one rank from a stream, by step; see `batching.StepBatches`.

    Args:
        data: the training files or dataset.
        tokenizer: the model's.
        special: ids for padding and for the decoder's start.
        world: all ranks; they agree on each step's micro-batches and tokens.
        epoch, row: where the next step begins: finished passes, and examples of this one.
        examples_seen: before that.
    """

    num_examples = None
    steps_per_epoch = None

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        special: SpecialIds,
        world: World,
        *,
        global_batch_size: int,
        micro_batch_tokens: int,
        seed: int,
        width_multiple: int = 1,
        epoch: int = 0,
        row: int = 0,
        examples_seen: int = 0,
    ) -> None:
        self._data, self._special, self._world = data, special, world
        self._encoder = Encoder(tokenizer, newline_id(tokenizer, data.keep_newlines))
        self._global_batch_size, self._limit = global_batch_size, micro_batch_tokens
        self._seed, self._width_multiple = seed, width_multiple
        self.longest_example = _longest_example(data, width_multiple)
        self._start = (epoch, row)
        self._seen = examples_seen

    def iterate(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Batches of the steps `first_step` to `last_step`; a collective at each.

        Reading and tokenizing run one step ahead, in a thread of their own.
        """
        if first_step > last_step:
            return
        local = self._locals(first_step)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="stream") as pool:
            ahead: Future[_Local] = pool.submit(next, local)
            for step in range(first_step, last_step + 1):
                mine = ahead.result()
                if step < last_step:
                    ahead = pool.submit(next, local)
                yield self._agree(step, mine)

    def _agree(self, step: int, mine: _Local) -> StepBatch:
        *tokens, padded = self._world.sum([*astuple(mine.tokens), mine.padded_tokens])
        # Every rank does the same number of forwards.
        most = int(self._world.maximum(len(mine.micro_batches)))
        blank = collate([], [], self._special, self._width_multiple)
        empty = [blank] * (most - len(mine.micro_batches))
        self._seen += mine.num_examples
        return StepBatch(
            step=step,
            epoch=float(mine.epoch),
            micro_batches=[*mine.micro_batches, *empty],
            micro_batch_names=lambda: [*mine.names, *([] for _ in empty)],
            num_examples=mine.num_examples,
            examples_seen=self._seen,
            tokens=TokenSums(*tokens),
            padded_tokens=int(padded),
            place={"epoch": mine.epoch, "row": mine.next_row, "examples_seen": self._seen},
        )

    def _locals(self, step: int) -> Iterator[_Local]:
        epoch, skipped = self._start
        while True:
            rng = numpy_generator(self._seed, "stream order", epoch)
            pairs = shuffled(read_pairs(self._data), self._data.shuffle_buffer, rng)
            for _ in itertools.islice(pairs, skipped):
                pass
            row = skipped
            while batch := list(itertools.islice(pairs, self._global_batch_size)):
                row, step = row + len(batch), step + 1
                yield self._local(epoch, row, batch, step)
            epoch, skipped = epoch + 1, 0

    def _local(self, epoch: int, next_row: int, batch: list[Pair], step: int) -> _Local:
        world_size = self._world.world_size
        # The first example of a batch goes to another rank each step.
        mine = batch[(self._world.rank + step) % world_size :: world_size]
        data, encoder = self._data, self._encoder
        documents = [with_prefix(document, data.prefix) for document, _ in mine]
        sources = self._cut(encoder.encode(documents), data.max_source_tokens)
        targets = self._cut(
            encoder.encode_lines([summary for _, summary in mine]), data.max_target_tokens
        )
        [groups] = divide_batch(
            [round_up(len(source), self._width_multiple) for source in sources],
            [round_up(len(target), self._width_multiple) for target in targets],
            world_size=1,
            micro_batch_tokens=self._limit,
        )
        micro_batches = [
            collate(
                [sources[i] for i in group],
                [targets[i] for i in group],
                self._special,
                self._width_multiple,
            )
            for group in groups
        ]
        return _Local(
            epoch=epoch,
            next_row=next_row,
            num_examples=len(batch),
            micro_batches=micro_batches,
            names=[[_beginning(mine[i][0]) for i in group] for group in groups],
            tokens=TokenSums.of(*(np.array([*map(len, ids)], int) for ids in (sources, targets))),
            padded_tokens=sum(
                m.input_ids.numel() + m.labels.numel()
                for m, group in zip(micro_batches, groups, strict=True)
                if group
            ),
        )

    def _cut(self, rows: list[list[int]], limit: int) -> list[np.ndarray]:
        return [np.array(self._encoder.cut(row, limit), np.int32) for row in rows]


def _beginning(document: str) -> str:
    """What an example of a stream is called, which has no number that its file would know."""
    return json.dumps(document[:_NAME_LETTERS], ensure_ascii=False)
