"""Tokenisers of the texts of a data set, which are built beside its shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from heron.shards.atomic import atomic_write
from heron.shards.index import ShardIndex

WORDS = 8192  # of a vocabulary, at most
SPECIAL = ["[CLS]", "[SEP]", "[UNK]", "[MASK]"]


def tokenizer_name(view: str) -> str:
    """Returns the name of the tokeniser of a view of texts."""
    return f"{view}.tokenizer.json"


def write_tokenizer(path: Path, texts: Iterable[str]) -> None:
    """Learns WordPiece (Schuster and Nakajima 2012) from texts, in lower case; writes a file."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=WORDS, special_tokens=SPECIAL, show_progress=False, min_frequency=2
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    with atomic_write(path) as stream:
        stream.write(made.to_str(pretty=True).encode())


def texts_of(tar: Path, index: ShardIndex, member: str) -> Iterator[str]:
    """Yields the texts of a shard."""
    column = index.column(member)
    file = os.open(tar, os.O_RDONLY)
    try:
        for start, length in zip(index.offsets[:, column], index.lengths[:, column], strict=True):
            if length:  # else the row lacks its text
                yield os.pread(file, int(length), int(start)).decode("utf-8-sig", "replace")
    finally:
        os.close(file)
