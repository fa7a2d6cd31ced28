"""Texts in the members of a tar, UTF-8 or a string of a JSON object, and their tokenisers."""

import json
import os
import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from heron.shards.atomic import atomic_write
from heron.shards.errors import shown
from heron.shards.index import ShardIndex
from heron.shards.manifest import View, member_names

LONGEST = 2**16  # bytes of a text that are looked at
LARGEST = 2**24  # bytes of a JSON object
MOST = 8192  # pieces of a vocabulary
TOKENIZER = ".tokenizer.json"  # after the name of a view
HALF = re.compile("[\ud800-\udfff]")  # of a character beyond 16 bits, which no UTF-8 has
SPECIAL = ["[CLS]", "[SEP]", "[UNK]", "[MASK]"]


def read_text(data: bytes, field: str | None = None) -> str:
    """Returns the text of a member, cut after `LONGEST` bytes.

    Args:
        data: of the member.
        field: of the JSON object that has it; None: the member is the text.

    Raises:
        ValueError: it is not UTF-8, no JSON object, or the field is no string of whole characters.
    """
    if field is not None:
        try:
            found = json.loads(data) if len(data) <= LARGEST else None
        except (ValueError, RecursionError):
            found = None
        text = found.get(field) if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"is {shown(data)}; expected JSON with a string called {field!r}")
        if HALF.search(text):
            raise ValueError(f"has half a character (a lone surrogate) in {field!r}; expected text")
        return text[:LONGEST]
    decoder = getincrementaldecoder("utf-8-sig")()
    try:  # a character that the cut parts is left out
        return decoder.decode(data[:LONGEST], final=len(data) <= LONGEST)
    except UnicodeDecodeError:
        raise ValueError(f"is {shown(data)}; expected UTF-8") from None


def texts_of(tar: Path, index: ShardIndex, member: str, field: str | None) -> Iterator[str]:
    """Yields the texts of a shard."""
    column = index.column(member)
    file = os.open(tar, os.O_RDONLY)
    try:
        for start, length in zip(index.offsets[:, column], index.lengths[:, column], strict=True):
            if length:  # else the row lacks its text
                yield read_text(os.pread(file, int(length), int(start)), field)
    finally:
        os.close(file)


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


def write_tokenizers(folder: Path, views: Sequence[View], tars: Mapping[Path, ShardIndex]) -> None:
    """Writes a tokeniser for each view of texts of some shards."""
    for view, member in zip(views, member_names(list(views), None), strict=True):
        if view.kind == "text":
            texts = (
                t for tar, index in tars.items() for t in texts_of(tar, index, member, view.field)
            )
            write_tokenizer(folder / f"{view.name}{TOKENIZER}", texts)
