"""Tokenisers of the texts of a data set, which are built beside its shards."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from heron.shards.atomic import atomic_write
from heron.shards.index import ShardIndex
from heron.shards.manifest import View, member_names
from heron.shards.texts import texts_of

MOST = 8192  # pieces of a vocabulary
TOKENIZER = ".tokenizer.json"  # after the name of a view
SPECIAL = ["[CLS]", "[SEP]", "[UNK]", "[MASK]"]


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
