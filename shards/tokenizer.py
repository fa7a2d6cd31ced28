"""Tokenisers of the texts of a data set, which are built beside its shards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from heron.shards.atomic import atomic_write
from heron.shards.index import ShardIndex

MOST = 8192  # pieces of a vocabulary
SPECIAL = ["[CLS]", "[SEP]", "[UNK]", "[MASK]"]


def tokenizer_name(view: str) -> str:
    """Returns the name of the tokeniser of a view of texts."""
    return f"{view}.tokenizer.json"


def write_tokenizer(path: Path, texts: Iterable[str]) -> None:
    """Writes a tokeniser of the commonest words of texts, in lower case.

    It reads as WordPiece does (Wu et al. 2016): the longest known piece first. Its pieces are whole
    words that occur twice, and single characters for the others. They are counted and sorted, not
    trained: the library's trainer makes another vocabulary each time.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = Counter(
        word
        for text in texts
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
    )
    first = {word[0] for word in words}
    later = {"##" + letter for word in words for letter in word[1:]}
    common = sorted((word for word in words if words[word] > 1), key=lambda w: (-words[w], w))
    pieces = [*SPECIAL, *sorted(first), *sorted(later), *common]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces[:MOST]))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizer, splitter
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    made.add_special_tokens(SPECIAL)
    with atomic_write(path) as stream:
        stream.write(made.to_str(pretty=True).encode())


def texts_of(tar: Path, index: ShardIndex, member: str) -> Iterator[str]:
    """Yields the texts of a shard."""
    column = index.column(member)
    file = os.open(tar, os.O_RDONLY)
    try:
        for start, length in zip(index.offsets[:, column], index.lengths[:, column], strict=True):
            yield os.pread(file, int(length), int(start)).decode("utf-8-sig", "replace")
    finally:
        os.close(file)
