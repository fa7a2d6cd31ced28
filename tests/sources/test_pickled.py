"""Pickles: what they may hold, and what they may not."""

import pickle
from typing import Any

import numpy as np
import pytest

from heron.base.errors import SourceError
from heron.sources.pickled import read_pickle
from tests.sources.pickles import Call, dumps2

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30)).astype(np.uint8)

REFUSED: list[tuple[bytes, str]] = [
    (pickle.dumps(Call(eval, "1")), "the global 'builtins.eval'"),
    (pickle.dumps(b"\xff", 2), "the global '_codecs.encode'"),
    (b"cos\nsystem\n(S'true'\ntR.", "the global 'os.system'"),
    (b"cnumpy\nload\n.", "the global 'numpy.load'"),
    (b"\x8c\x05numpy\x8c\x0bdtype.__new\x93.", "the global 'numpy.dtype.__new'"),
    (b"(ios\nsystem\n.", "the opcode INST"),
    (b"(cnumpy\ndtype\no.", "the opcode OBJ"),
    (b"cnumpy\ndtype\n)\x81.", "the opcode NEWOBJ"),
    (b"Pposix\n.", "the opcode PERSID"),
    (b"\x82\1.", "the opcode EXT1"),
    (pickle.dumps(np.array([{}]), 4), "an array of dtype 'O8'"),
    (pickle.dumps(np.array([b"x"]), 4), "an array of dtype 'S1'"),
    (dumps2(np.zeros(3, "i4")), "an array of dtype b'i4'"),
    (pickle.dumps(np.asfortranarray(PIXELS[:2, :2]), 4), "an array in Fortran's order"),
    (b"cnumpy._core.multiarray\n_reconstruct\n)R(K\1)NI00\nC\0tb.", "an array of other than bytes"),
    (b"]" * (1 << 19) + b".", "more than 524,288 opcodes"),
    (b"})" + b"\x85" * 500_000 + b"Ns.", "more than 1,000 tuples"),
    # Python's own reader sets 16 bytes aside for each number up to it.
    (b"]r\xfe\xff\xff\xff.", "memo number 4,294,967,294"),
]
DAMAGED: list[bytes] = [
    b"",
    b"]",
    pickle.dumps(PIXELS, 4)[:-9],
    b"cnumpy\nndarray\n)R.",  # what is allowed by name, and not what NumPy writes
    b"cnumpy\ndtype\n}b.",
    b"U\5posix)R.",
    dumps2(np.zeros(3, "u1")).replace(b"K\3\x85", b"K\4\x85"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_what_a_pickle_may_not_hold(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match="meta: a pickle with .*it was not executed") as raised:
        read_pickle(data, "meta")
    assert message in str(raised.value)


@pytest.mark.parametrize("data", DAMAGED)
def test_damaged_pickles(data: bytes) -> None:
    with pytest.raises(SourceError, match="meta: a pickle cut short or damaged .*; download it ag"):
        read_pickle(data, "meta")


@pytest.mark.parametrize("value", [{"a": [1, -1, 70_000, None, True, (1, (2, 3), ())]}, "ü", b"\0"])
@pytest.mark.parametrize("protocol", [3, 4])
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), "x") == value


def test_a_python_2_pickle_is_what_python_reads() -> None:
    data = dumps2({b"batch_label": b"a batch", b"data": PIXELS, b"labels": [1, 300, 70_000]})
    assert data.startswith(
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x07a batchq\x03U\x04dataq\x04cnumpy.core.multi"
    )
    read, known = read_pickle(data, "x"), pickle.loads(data, encoding="bytes")
    assert [key.encode() for key in read] == list(known)
    np.testing.assert_array_equal(read.pop("data"), known.pop(b"data"))
    assert list(read.values()) == list(known.values())
