"""The source `celeba`: zips and folders, lists and partitions, and what it says of bad ones."""

import hashlib
import shutil
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from heron.base.errors import SourceError
from heron.base.workers import Processes
from heron.cli.main import main
from heron.shards.build import build
from heron.shards.manifest import load_manifest
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source
from tests.shards.tiny import whole

DATA = Path(__file__).parents[3] / "shared" / "data" / "celeba"
FILES = ["000001.jpg", "000002.jpg", "000007.jpg", "a-b_c.jpg"]
LIST = """4
Bald Young Smiling
000001.jpg -1  1  1
000002.jpg  1 -1 -1
000007.jpg -1 -1 -1
a-b_c.jpg   1  1  1
"""
BITS = [[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]]
PARTITION = "000001.jpg 1\n000002.jpg 0\n000007.jpg 2\na-b_c.jpg 0\n"
PAGE = b'\n <!DOCTYPE html><html lang="en">Google Drive - Quota exceeded</html>'
ZIPPED, LISTED, PARTED = "img_align_celeba.zip", "list_attr_celeba.txt", "list_eval_partition.txt"


def jpeg(seed: int, size: tuple[int, int] = (4, 6)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


PICTURES = {f"img_align_celeba/{name}": jpeg(seed) for seed, name in enumerate(FILES)}


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return stream.getvalue()


def celeba(folder: Path, changes: dict[str, bytes] | None = None, /, **options: object) -> Source:
    """Four pictures with three attributes; `changes` replace the publisher's files."""
    files = {ZIPPED: zipped(PICTURES), LISTED: LIST.encode(), PARTED: PARTITION.encode()}
    for name, data in (files | (changes or {})).items():
        (folder / name).write_bytes(data)
    paths = {"images": folder / ZIPPED, "attributes": folder / LISTED, "partition": folder / PARTED}
    return make_source("celeba", {k: v for k, v in (paths | options).items() if v is not None})


def fault_of(folder: Path, changes: dict[str, bytes], **options: object) -> str:
    with pytest.raises(SourceError) as fault:
        build(celeba(folder, changes, **options), folder / "out", progress=False)
    assert not list((folder / "out").glob("*.tar"))
    return str(fault.value)


def test_a_partition_splits_the_rows(tmp_path: Path) -> None:
    source = celeba(tmp_path)
    assert source.splits == {"train": 2, "val": 1, "test": 1} and source.dataset == "celeba"
    assert source.views[0].shape == (6, 4, 3)
    assert source.labels.kind == "multi_label"
    assert source.labels.names == ["Bald", "Young", "Smiling"]
    rows = whole(source, "train")
    assert rows.keys == ["000002", "a-b_c"] and rows.views["image"] == [jpeg(1), jpeg(3)]
    assert rows.labels.dtype == np.uint8 and rows.labels.tolist() == [BITS[1], BITS[3]]
    assert source.read("train", 1, 2).keys == ["a-b_c"]
    assert whole(source, "val").keys == ["000001"] and whole(source, "test").keys == ["000007"]


@pytest.mark.parametrize("options", [{"merge": True}, {"partition": None}])
def test_one_split_has_the_order_of_the_list(tmp_path: Path, options: dict[str, object]) -> None:
    backwards = "\n".join([*LIST.splitlines()[:2], *LIST.splitlines()[:1:-1]])
    source = celeba(tmp_path, {LISTED: backwards.encode()}, **options)
    assert source.splits == {"all": 4}
    rows = whole(source, "all")
    assert rows.keys == [name.removesuffix(".jpg") for name in FILES[::-1]]
    assert rows.labels.tolist() == BITS[::-1]
    assert rows.views["image"] == [jpeg(seed) for seed in (3, 2, 1, 0)]


def test_a_split_without_rows_is_none(tmp_path: Path) -> None:
    changes = {PARTED: PARTITION.replace(".jpg 2", ".jpg 0").encode()}
    assert celeba(tmp_path, changes).splits == {"train": 3, "val": 1}


@pytest.mark.parametrize(
    "members",
    [
        {name.rpartition("/")[2]: data for name, data in PICTURES.items()},
        {"deep/" + name: data for name, data in PICTURES.items()},
        PICTURES | {"img_align_celeba/": b"", "img_align_celeba/.DS_Store": b"x"},
        PICTURES | {"__MACOSX/img_align_celeba/._000001.jpg": b"x"},
        dict(reversed(PICTURES.items())),
    ],
)
def test_where_pictures_lie_in_a_zip(tmp_path: Path, members: dict[str, bytes]) -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        source = celeba(tmp_path, {ZIPPED: zipped(members, method)}, merge=True)
        assert whole(source, "all").views["image"] == [jpeg(seed) for seed in range(4)]


def unpacked(folder: Path) -> Path:
    for name, data in (PICTURES | {"img_align_celeba/.hidden": b"x"}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_folder_of_pictures_is_as_good_as_their_zip(tmp_path: Path) -> None:
    (outer := tmp_path / "outer").mkdir()
    inner = unpacked(outer) / "img_align_celeba"
    manifests = [
        build(celeba(tmp_path, images=images), tmp_path / f"out{number}", progress=False)
        for number, images in enumerate((tmp_path / ZIPPED, outer, inner))
    ]
    assert manifests[0].splits == manifests[1].splits == manifests[2].splits
    records = [manifest.built_from.files for manifest in manifests]
    assert records[1] == records[2] and records[0][1:] == records[1][1:]
    assert [record.name for record in records[1]] == ["img_align_celeba", LISTED, PARTED]
    assert records[1][0].bytes == sum(map(len, PICTURES.values()))
    zip_bytes = (tmp_path / ZIPPED).read_bytes()
    assert records[0][0].sha256 == hashlib.sha256(zip_bytes).hexdigest()


@pytest.mark.parametrize(
    "data",
    [
        LIST.replace("\n", "\r\n").encode(),
        LIST.replace(" ", "\t").encode(),
        b"\xef\xbb\xbf" + LIST.strip().encode(),
        f"{LIST}\n  \n".encode(),
        zipped({"Anno/list_attr_celeba.txt": LIST.encode()}, zipfile.ZIP_DEFLATED),
        zipped({"list.txt": LIST.encode(), "__MACOSX/._list.txt": b"x", ".x.txt": b"x"}),
    ],
)
def test_forms_of_the_list(tmp_path: Path, data: bytes) -> None:
    source = celeba(tmp_path, {LISTED: data}, merge=True)
    assert whole(source, "all").labels.tolist() == BITS and len(source.labels.names) == 3


def test_workers_make_the_same_bytes(tmp_path: Path) -> None:
    source = celeba(tmp_path, merge=True)
    one, two = (
        build(
            source,
            tmp_path / str(workers),
            executor=Processes(workers),
            shard_rows=2,
            progress=False,
        )
        for workers in (1, 2)
    )
    assert one == two and len(one.splits["all"]) == 2
    assert verify(tmp_path / "1").ok
    assert build(source, tmp_path / "1", progress=False, shard_rows=2) == one  # nothing to do


FEWER = "\n".join(["3", *LIST.splitlines()[1:5]]).encode()  # without a-b_c.jpg
FEWER_PARTS = "\n".join(PARTITION.splitlines()[1:]).encode()  # without 000001.jpg
GAPS: list[tuple[dict[str, bytes], str, list[str]]] = [
    (
        {ZIPPED: zipped({"000002.jpg": jpeg(1)})},
        f"{ZIPPED} lacks 3 of the 4 pictures of {LISTED} (000001.jpg first)",
        ["000002"],
    ),
    (
        {LISTED: FEWER, PARTED: PARTITION[: 3 * 13].encode()},
        f"{LISTED} lacks 1 of the 4 pictures of {ZIPPED} (a-b_c.jpg first)",
        ["000001", "000002", "000007"],
    ),
    (
        {PARTED: FEWER_PARTS},
        f"{PARTED} lacks 1 of the 4 pictures of {LISTED} (000001.jpg first)",
        ["000002", "000007", "a-b_c"],
    ),
    (
        {PARTED: PARTITION.encode() + b"7.jpg 0\n8.jpg 2\n"},
        f"{LISTED} lacks 2 of the 6 pictures of {PARTED} (7.jpg first)",
        ["000001", "000002", "000007", "a-b_c"],
    ),
]


@pytest.mark.parametrize(("changes", "gap", "kept"), GAPS)
@pytest.mark.parametrize("merge", [True, False])
def test_files_must_name_the_same_pictures(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, bytes],
    gap: str,
    kept: list[str],
    merge: bool,
) -> None:
    assert fault_of(tmp_path, changes, merge=merge) == (
        f"{gap}; the files must name the same pictures: add what is missing, or build only those "
        "that all files name with --missing leave_out"
    )
    source = celeba(tmp_path, changes, merge=merge, missing="leave_out")
    build(source, tmp_path / "out", progress=False, shard_rows=1)
    assert caplog.messages == [
        f"celeba: left out what the files do not share; {len(kept)} rows remain: {gap}"
    ]
    assert verify(tmp_path / "out").ok
    keys = [whole(source, split).keys or [] for split in source.splits]
    assert sorted(sum(keys, [])) == kept
    for split in source.splits:
        rows = whole(source, split)
        expected = [BITS[FILES.index(f"{key}.jpg")] for key in rows.keys or []]
        assert rows.labels.tolist() == expected


def test_every_gap_is_named(tmp_path: Path) -> None:
    changes = {ZIPPED: zipped({"000002.jpg": jpeg(1), "x.jpg": jpeg(2)}), PARTED: FEWER_PARTS}
    assert fault_of(tmp_path, changes).startswith(
        f"{ZIPPED} lacks 3 of the 4 pictures of {LISTED} (000001.jpg first); "
        f"{LISTED} lacks 1 of the 2 pictures of {ZIPPED} (x.jpg first); "
        f"{PARTED} lacks 1 of the 4 pictures of {LISTED} (000001.jpg first); the files must"
    )


def test_nothing_is_said_where_nothing_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert celeba(tmp_path, missing="leave_out").splits == {"train": 2, "val": 1, "test": 1}
    assert not caplog.messages


def test_nothing_in_common_is_no_data_set(tmp_path: Path) -> None:
    changes = {ZIPPED: zipped({"x.jpg": jpeg(0)})}
    assert fault_of(tmp_path, changes, missing="leave_out") == (
        f"no picture is in all of {ZIPPED}, {LISTED}, {PARTED}; pass the files of one data set"
    )


def line(number: int, text: str) -> dict[str, bytes]:
    """The list with another line (from 1)."""
    lines = LIST.splitlines()
    lines[number - 1] = text
    return {LISTED: "\n".join(lines).encode()}


def lists(*members: str) -> dict[str, bytes]:
    return {LISTED: zipped({name: LIST.encode() for name in members})}


NAMED = "cannot name a picture, which is NAME.jpg, its name of letters, digits, '-' and '_'"
COUNT = "pass list_attr_celeba.txt as its publisher distributes it"
ONE_OF = "must have 1 values of 0 or 1 or 2, got "
THREE = "must have 3 values of -1 or 1, got "
BAD_LISTS: list[tuple[dict[str, bytes], str]] = [
    (
        {LISTED: PAGE},
        f"{LISTED} is an HTML page (a download quota page?), not a list of",
    ),
    ({PARTED: PAGE}, f"{PARTED} is an HTML page (a download quota page?), not a list of"),
    ({LISTED: b""}, f"{LISTED}, line 1 must be the number of pictures alone, got ''; {COUNT}"),
    (
        line(1, "four"),
        f"{LISTED}, line 1 must be the number of pictures alone, got 'four'; {COUNT}",
    ),
    (
        {LISTED: LIST[2:].encode()},
        f"{LISTED}, line 1 must be the number of pictures alone, got 'Bald Young Smiling'",
    ),
    (
        {LISTED: b"7z\xbc" + bytes(99)},
        f"{LISTED}, line 1 must be the number of pictures alone, got '7z\ufffd\\x00",
    ),
    (
        line(1, "202599"),
        f"{LISTED}: 3 attributes of 4 pictures, and line 1 counts 202,599; download it ag",
    ),
    (line(1, "٤"), f"{LISTED}, line 1 must be the number of pictures alone, got '٤'; {COUNT}"),
    (line(1, "9" * 5000), f"{LISTED}, line 1 must be the number of pictures alone, got '9999"),
    (line(2, "Bald \ufeffYoung Smiling"), r"a label has the name '\ufeffYoung'"),
    (line(1, "3"), f"{LISTED}: 3 attributes of 4 pictures, and line 1 counts 3"),
    (line(4, "000002.jpg 1 -1"), f"{LISTED}, line 4: 000002.jpg {THREE}'1 -1'"),
    (line(6, "a-b_c.jpg 1 1 1 1"), f"{LISTED}, line 6: a-b_c.jpg {THREE}'1 1 1 1'"),
    (
        line(4, "000002.jpg 1 0 -1"),
        f"{LISTED}, line 4: 000002.jpg {THREE}'1 0 -1'",
    ),
    (
        line(5, "000007.jpg 1 1 1.0"),
        f"{LISTED}, line 5: 000007.jpg {THREE}'1 1 1.0'",
    ),
    (line(5, "000001.jpg 1 1 1"), f"{LISTED}, line 5: 000001.jpg is also in line 3"),
    (
        line(3, "../x.jpg 1 1 1"),
        f"{LISTED}, line 3: '../x.jpg' {NAMED}; download it again",
    ),
    (line(3, "000001.png 1 1 1"), f"{LISTED}, line 3: '000001.png' {NAMED}"),
    (line(3, "x" * 65 + ".jpg 1"), f"{LISTED}, line 3: '{'x' * 59}… {NAMED}"),
    (
        {LISTED: b"0\nBald\n"},
        f"{LISTED}: 1 attributes of 0 pictures, and line 1 counts 0; download it",
    ),
    (
        line(2, "Bald Young Bald"),
        f"{LISTED}, {PARTED}: two labels have the name 'Bald'; names must be unique",
    ),
    (
        lists("a.txt", "b/c.txt"),
        f"{LISTED} has 2 .txt files instead of one; unpack it and pass its .txt",
    ),
    ({LISTED: lists("a.txt")[LISTED][:-9]}, f"{LISTED}: no zip, or a damaged one (File is not"),
    ({LISTED: zipped({"a.txt": PAGE})}, f"{LISTED}/a.txt is an HTML page (a download quota page?)"),
    ({LISTED: zipped({"a.txt": b"4\nx"})}, f"{LISTED}/a.txt: 1 attributes of 0 pictures, and line"),
    ({PARTED: b"000001.jpg 3\n"}, f"{PARTED}, line 1: 000001.jpg {ONE_OF}'3'"),
    ({PARTED: b"\n000001.jpg -1\n"}, f"{PARTED}, line 2: 000001.jpg {ONE_OF}'-1'"),
    ({PARTED: b"000001.jpg\n"}, f"{PARTED}, line 1: 000001.jpg {ONE_OF}''"),
    ({PARTED: b"/x.jpg 0\n"}, f"{PARTED}, line 1: '/x.jpg' {NAMED}"),
    (
        {PARTED: b"000001.jpg 0\n000001.jpg 0\n"},
        f"{PARTED}, line 2: 000001.jpg is also in line 1",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_LISTS)
def test_bad_lists(tmp_path: Path, changes: dict[str, bytes], message: str) -> None:
    assert message in fault_of(tmp_path, changes)


def with_picture(name: str, data: bytes = b"x") -> dict[str, bytes]:
    return {ZIPPED: zipped(PICTURES | {name: data})}


DAMAGED = bytearray(zipped(PICTURES))
DAMAGED[DAMAGED.index(jpeg(2)) + 400] ^= 1  # of 000007.jpg
FIRST, THIRD = "img_align_celeba/000001.jpg", "img_align_celeba/000007.jpg"
WHOLE = f"it must be {ZIPPED}, or a folder of the pictures; download it again"
NO_PICTURE = "is not a picture named NAME.jpg, its name of letters, digits, '-' and '_'"
BAD_ZIPS: list[tuple[dict[str, bytes], str]] = [
    ({ZIPPED: PAGE}, f"{ZIPPED}: an HTML page (a download quota page?); {WHOLE}"),
    ({ZIPPED: LIST.encode()}, f"it begins with b'4\\nBald Y'); {WHOLE}"),
    ({ZIPPED: zipped(PICTURES)[:-100]}, f"{ZIPPED}: no zip, or a damaged one (File is not a zip"),
    ({ZIPPED: bytes(DAMAGED)}, f"cannot read {THIRD} of {ZIPPED} (Bad CRC-32 for file"),
    (with_picture("../x.jpg"), f"{ZIPPED}: the path '../x.jpg' may lead out of its folder"),
    (with_picture("img/read me.txt"), f"{ZIPPED}: 'img/read me.txt' {NO_PICTURE}"),
    (
        with_picture("0009.png"),
        f"{ZIPPED}: '0009.png' {NO_PICTURE}; pass the file of another release",
    ),
    (
        with_picture("000001.jpg"),
        f"{ZIPPED}: 000001.jpg occurs twice, as {FIRST} and as 000001.jpg; remove one of them",
    ),
    (with_picture(FIRST, PAGE), f"{ZIPPED}: 000001.jpg is not a JPEG"),
    (
        with_picture(FIRST, b""),
        f"{ZIPPED}: 000001.jpg is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with b''",
    ),
    (with_picture(FIRST, jpeg(0)[:9]), f"{ZIPPED}: 000001.jpg is a damaged JPEG ("),
    (with_picture(FIRST, jpeg(0)[:-2]), f"{ZIPPED}: 000001.jpg is cut short; it must be a whole"),
    (
        with_picture(THIRD, jpeg(0, (8, 9))),
        f"{ZIPPED}: 000007.jpg is 8 × 9 pixels, but 000001.jpg is 4 × 6, and the aligned pictures "
        "are all of one size; pass img_align_celeba, not the pictures in the wild",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ZIPS)
def test_bad_zips(tmp_path: Path, changes: dict[str, bytes], message: str) -> None:
    assert message in fault_of(tmp_path, changes, merge=True)


def test_what_is_bad_is_left_out_and_counted(tmp_path: Path) -> None:
    bad = {FIRST: jpeg(0)[:-2], THIRD: jpeg(0, (8, 9)), "img_align_celeba/read me.txt": b""}
    options = {"merge": True, "on_error": "skip"}
    source = celeba(tmp_path, {ZIPPED: zipped(PICTURES | bad)}, **options)
    manifest = build(source, tmp_path / "out", executor=Processes(2), progress=False)
    assert manifest.rows("all") == 2 and verify(tmp_path / "out").ok
    assert manifest.skipped is not None and manifest.skipped.count == 3
    assert "000007.jpg must be 4 × 6, got 8 × 9 pixels" in str(manifest.skipped)
    words = [
        f"--images={tmp_path / ZIPPED}",
        f"--attributes={tmp_path / LISTED}",
        "--on-error=skip",
    ]
    command = ["shards", "build", "celeba", *words, "--out", str(tmp_path / "out2"), "--quiet"]
    assert main(command) == 0


@pytest.mark.parametrize("missing", ["error", "leave_out"])
def test_bad_folders(tmp_path: Path, missing: str) -> None:
    images = unpacked(tmp_path) / "img_align_celeba"
    options: dict[str, object] = {"images": images, "missing": missing}
    (images / "000007.jpg").write_bytes(jpeg(2)[:-2])
    message = (
        "img_align_celeba: 000007.jpg is cut short; it must be a whole JPEG; download it again"
    )
    assert message in fault_of(tmp_path, {}, merge=True, **options)
    (images / "list.txt").write_text("")
    message = "img_align_celeba: 'list.txt' is not a picture named NAME.jpg, its name of letters"
    assert message in fault_of(tmp_path, {}, **options)
    shutil.rmtree(images)
    images.mkdir()
    message = f"img_align_celeba lacks 4 of the 4 pictures of {LISTED} (000001.jpg first)"
    if missing == "leave_out":
        message = f"no picture is in all of img_align_celeba, {LISTED}, {PARTED}"
    assert message in fault_of(tmp_path, {}, **options)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="celeba: images: it does not exist"):
        celeba(tmp_path, images=tmp_path / "no.zip")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    celeba(tmp_path, {ZIPPED: zipped({"000002.jpg": jpeg(1)})})
    words = ["shards", "build", "celeba", "--images", str(tmp_path / ZIPPED)]
    words += ["--attributes", str(tmp_path / LISTED), "--partition", str(tmp_path / PARTED)]
    words += ["--merge", "true", "--out", str(out := tmp_path / "out"), "--quiet"]
    assert main(words) == 1
    assert "lacks 3 of the 4 pictures" in capsys.readouterr().err
    assert main([*words, "--missing", "leave_out"]) == 0
    manifest = load_manifest(out)
    assert manifest.rows("all") == 1 and verify(out).ok
    assert [file.name for file in manifest.built_from.files] == [ZIPPED, LISTED, PARTED]


def test_published_files() -> None:
    if not DATA.exists():
        pytest.skip("no celeba in the data folder")
    options: dict[str, object] = {"images": DATA / ZIPPED, "attributes": DATA / LISTED}
    source = make_source("celeba", options | {"partition": DATA / PARTED})
    assert source.splits == {"train": 8000, "val": 1000, "test": 1000}
    assert source.views[0].shape == (218, 178, 3) and len(source.labels.names) == 40
    rows = source.read("train", 0, 100)
    assert rows.keys and rows.keys[:2] == ["000001", "000021"]
    smiling = source.labels.names.index("Smiling")
    assert rows.labels[0, smiling] == 1 and rows.labels.shape == (100, 40)
    full = options | {"attributes": DATA / "full" / "list_attr_celeba.zip"}
    with pytest.raises(SourceError, match="lacks 192,599 of the 202,599 pictures of list_attr_cel"):
        _ = make_source("celeba", full).splits
    part = make_source("celeba", full | {"missing": "leave_out"})
    assert part.splits == {"all": 10_000}
    same = make_source("celeba", options).read("all", 9_990, 10_000)
    np.testing.assert_array_equal(part.read("all", 9_990, 10_000).labels, same.labels)
