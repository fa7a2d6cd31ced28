"""Texts in the members of a tar, as UTF-8 or strings of JSON objects, and their tokenisers."""

import json
import os
import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from heron.base.atomic import atomic_write
from heron.base.errors import short_repr
from heron.shards.index import ShardIndex
from heron.shards.manifest import View, member_names

MAX_TEXT_BYTES = 2**16  # bytes of a text that are read
MAX_JSON_BYTES = 2**24  # bytes of a JSON object
MAX_PIECES = 8192  # in a vocabulary
TOKENIZER = ".tokenizer.json"  # appended to the name of a view
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character beyond 16 bits, invalid in UTF-8
SPECIAL_TOKENS = ["[CLS]", "[SEP]", "[UNK]", "[MASK]"]


def read_text(data: bytes, field: str | None = None) -> str:
    """Returns the text of a member, or of a `field` of its JSON, cut after `MAX_TEXT_BYTES`.

    Raises ValueError where it is not UTF-8, not a JSON object, or the field is no valid string.
    """
    if field is not None:
        try:
            fields = json.loads(data) if len(data) <= MAX_JSON_BYTES else None
        except (ValueError, RecursionError):
            fields = None
        text = fields.get(field) if isinstance(fields, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"must be JSON with a string called {field!r}, got {short_repr(data)}")
        if SURROGATE.search(text):
            raise ValueError(f"has half a character (a lone surrogate) in {field!r}")
        return text[:MAX_TEXT_BYTES]
    decoder = getincrementaldecoder("utf-8-sig")()
    try:  # drops a character that the cut splits
        return decoder.decode(data[:MAX_TEXT_BYTES], final=len(data) <= MAX_TEXT_BYTES)
    except UnicodeDecodeError:
        raise ValueError(f"must be UTF-8, got {short_repr(data)}") from None


def texts_of(tar: Path, index: ShardIndex, member: str, field: str | None) -> Iterator[str]:
    """Yields the texts of a shard."""
    column = index.column(member)
    file = os.open(tar, os.O_RDONLY)
    try:
        for start, length in zip(index.offsets[:, column], index.lengths[:, column], strict=True):
            if length:  # 0: the row lacks its text
                yield read_text(os.pread(file, int(length), int(start)), field)
    finally:
        os.close(file)


def words_of(texts: Iterable[str]) -> Counter[str]:
    """Returns how often some texts have each lower-case word."""
    from tokenizers import normalizers, pre_tokenizers

    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return Counter(
        word
        for text in texts
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
    )


def count_words(tar: Path, index: ShardIndex, views: Sequence[View]) -> dict[str, Counter[str]]:
    """Returns the words of the texts of a shard, by text view."""
    return {
        view.name: words_of(texts_of(tar, index, member, view.field))
        for view, member in zip(views, member_names(list(views), None), strict=True)
        if view.kind == "text"
    }


def add_words(total: dict[str, Counter[str]], more: Mapping[str, Counter[str]]) -> None:
    """Adds the words of more texts, by view."""
    for name, words in more.items():
        total.setdefault(name, Counter()).update(words)


def write_tokenizers(folder: Path, words: Mapping[str, Counter[str]]) -> list[str]:
    """Writes a lower-case tokeniser of the most frequent words of each view; returns their names.

    It matches the longest known piece first, as WordPiece does (Wu et al. 2016). Its pieces are
    the words that occur at least twice, and single characters for the others. They are counted and
    sorted rather than trained, since the library's trainer is not deterministic.
    """
    for name, counts in words.items():
        with atomic_write(folder / f"{name}{TOKENIZER}") as stream:
            stream.write(_tokenizer(counts).to_str(pretty=True).encode())
    return [f"{name}{TOKENIZER}" for name in words]


def _tokenizer(words: Counter[str]) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    initials = {word[0] for word in words}
    continuations = {"##" + letter for word in words for letter in word[1:]}
    frequent = sorted((w for w in words if words[w] > 1), key=lambda w: (-words[w], w))
    pieces = [*SPECIAL_TOKENS, *sorted(initials), *sorted(continuations), *frequent]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces[:MAX_PIECES]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer
