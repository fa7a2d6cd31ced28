"""Tars of others: indexed where they lie, verified, shown, and trained on."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.api.job import pretrain
from heron.base.errors import ShardError, SourceError
from heron.cli.main import main
from heron.experiment.config import parse_config
from heron.shards.index import ShardIndex
from heron.shards.manifest import load_manifest
from heron.shards.show import show
from heron.shards.verify import verify
from heron.sources.layout import Layout
from heron.training.tracking import read_metrics
from tests.experiments import FRAMES, merge
from tests.shards.others import cats, jpeg, labels, npy, png, run, write_tar, write_wds
from tests.shards.tiny import bomb


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two splits as WebDataset's own writer makes them."""
    write_wds(tmp_path / "cats-train-0000.tar", cats(0, 5))
    write_wds(tmp_path / "cats-train-0001.tar", cats(5, 4))
    write_wds(tmp_path / "cats-validation-0000.tar", cats(9, 3))
    return tmp_path


def test_a_set_is_indexed_where_it_lies(folder: Path) -> None:
    before = {tar: (tar.read_bytes(), tar.stat().st_mtime_ns) for tar in folder.glob("*.tar")}
    outcome = run(folder, image=["jpg"], label="cls")
    assert {tar: (tar.read_bytes(), tar.stat().st_mtime_ns) for tar in before} == before
    manifest = load_manifest(folder)
    assert outcome.manifest == manifest and manifest.foreign and manifest.members == ["jpg"]
    assert {split: manifest.rows(split) for split in manifest.splits} == {"train": 9, "val": 3}
    (view,) = manifest.views
    assert (view.name, view.kind, view.shape) == ("image", "image", (8, 8, 3))
    assert manifest.labels.kind == "multi_class" and manifest.labels.names == ["0", "1", "2"]
    assert labels(folder) == [n % 3 for n in range(12)]
    for shard in manifest.splits["train"]:
        data, found = (folder / shard.file).read_bytes(), ShardIndex.read(folder / shard.index_file)
        for key, at, size in zip(found.keys, found.offsets, found.lengths, strict=True):
            assert data[at[0] : at[0] + size[0]] == jpeg(int(key))
    report = verify(folder)
    assert report.ok and report.rows == 12, str(report)
    assert "multi_class labels (3)" in show(folder)
    assert str(outcome).splitlines() == [
        f"{folder}: train 9 rows in 2 shards",
        f"{folder}: val 3 rows in 1 shard",
        "view image: image 8 × 8 × 3, of jpg",
        "labels: multi_class, 3 names",
    ]


def test_workers_write_the_same_bytes(folder: Path) -> None:
    def written() -> dict[str, bytes]:
        names = [*folder.glob("*.npz"), folder / "manifest.json"]
        return {path.name: path.read_bytes() for path in names}

    run(folder, image=["jpg"], label="cls")
    one = written()
    run(folder, image=["jpg"], label="cls", overwrite=True, workers=2)
    assert written() == one and len(one) == 4


def test_views_of_several_kinds(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(4, 5)).astype("f4")
    samples = [
        {
            "__key__": f"a/{n}",
            "left.jpg": jpeg(n, 8 + n, 16),
            "right.rgb.png": png(n),
            "audio.npy": npy(vectors[n]),
            "caption.txt": "of a cat",
            "secret.pkl": b"cos\nsystem\n(S'false'\ntR.",  # is never decoded
        }
        for n in range(4)
    ]
    write_wds(tmp_path / "train-0.tar", samples[:3])
    write_wds(tmp_path / "test-0.tar", samples[3:])
    outcome = run(tmp_path, image=["left.jpg", "right.rgb.png"], vector=["audio.npy"])
    manifest = outcome.manifest
    assert [(v.name, v.member, v.shape) for v in manifest.views] == [
        ("left", "left.jpg", (-1, 16, 3)),
        ("right_rgb", "right.rgb.png", (8, 8, 3)),
        ("audio", "audio.npy", (5,)),
    ]
    np.testing.assert_allclose(manifest.views[2].mean or [], vectors[:3].mean(0), rtol=1e-6)
    np.testing.assert_allclose(manifest.views[2].std or [], vectors[:3].std(0), rtol=1e-6)
    assert manifest.labels.kind == "none"
    assert outcome.unrequested == ["caption.txt", "secret.pkl"]
    assert "not indexed: members caption.txt, secret.pkl" in str(outcome)
    assert verify(tmp_path).ok
    assert "none labels (0)" in show(tmp_path)


def test_names_of_views_and_suffixes_of_either_kind(tmp_path: Path) -> None:
    samples = [("0.jpg", jpeg(0)), ("0.npy", npy([1, 2], "f4")), ("1.JPEG", png(1))]
    write_tar(tmp_path / "a.tar", [*samples, ("1.npy", npy([3, 4], "f4"))])
    manifest = run(tmp_path, image=["jpg,jpeg"], vector=["npy"]).manifest
    assert [(v.name, v.member) for v in manifest.views] == [("image", "jpg"), ("vector", "npy")]
    assert verify(tmp_path).ok
    names = [c.name for c in Layout(image=["a.jpg", "b.jpg"], vector=["a.npy"]).columns]
    assert names == ["a_jpg", "b_jpg", "a_npy"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"image": ["pkl"]}, "no such view can be read from 'pkl'; use jpg, jpeg, jpe, jfif"),
        ({"vector": ["npz"]}, "no such view can be read from 'npz'; use npy, or a name before it"),
        ({"image": ["jpg", "jpg"]}, "view names must be unique, got jpg, jpg"),
        (
            {"image": ["jpg"], "on_error": "ignore"},
            "'raise' or 'skip', got 'ignore'; see `heron shards index --help`",
        ),
        ({"image": ["a b.jpg"]}, "no such view can be read from 'a b.jpg'; use jpg"),
        ({"image": [f"{'a' * 41}.jpg", "b.jpg"]}, "cannot name a view or a split"),
    ]
    for options, message in wrong:
        with pytest.raises(SourceError, match=message):
            run(tmp_path, **options, overwrite=True)


BAD = [
    ({"jpg": jpeg(1)[:100]}, "member 'jpg' is a damaged JPEG (tjDecompressHeader3()"),
    ({"jpg": png(1)[:20]}, "member 'jpg' is a damaged PNG ("),
    ({"jpg": b"<html>"}, "is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with b'<html>'"),
    ({"jpg": b""}, "is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with b''"),
    (
        {"jpg": png(1)[:16] + b"\0\1\0\0\0\1\0\0" + png(1)[24:]},
        "member 'jpg' is a damaged PNG (",  # its header has another checksum
    ),
    ({"jpg": bomb()}, "member 'jpg' must have 1 to 134,217,728 pixels, got 65536 × 65536"),
    (
        {"jpg": jpeg(1, 64, 64)[:-2]},
        "a.tar sample 1 member 'jpg' is cut short; it must be a whole JPEG",
    ),
    ({"jpg": jpeg(1, 64, 64)[:700]}, "member 'jpg' is cut short; it must be a whole JPEG"),
    ({"jpg": png(1)[:-9]}, "member 'jpg' is cut short; it must be a whole PNG"),
    (
        {"jpg": png(1)[:-20] + png(1)[-12:]},
        "member 'jpg' is a damaged PNG (its part b'IDAT' has an",
    ),
    ({"npy": npy([1, 2])}, "member 'npy' must be a vector of float32, since it is mapped in place"),
    (
        {"npy": npy([[1, 2]], "f4")},
        "member 'npy' must be a vector of float32, since it is mapped in place",
    ),
    ({"npy": npy([1, np.nan], "f4")}, "a.tar sample 1 member 'npy' has NaN or infinite values"),
    ({"npy": npy([None])}, "an array of Python objects is a pickle, never decoded"),
    ({"npy": npy([1, 2], "f4")[:-1]}, "member 'npy' is not a vector: an array of float32"),
    ({"npy": None}, "a.tar sample 1 lacks 'npy'; it has ['jpg', 'cls'], not one of each view"),
    ({"jpg": None}, "a.tar sample 1 lacks 'jpg' or 'jpeg'; it has ['npy', 'cls']"),
    ({"jpeg": jpeg(1)}, "a.tar sample 1 has both 'jpg' or 'jpeg'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_samples_that_are_bad_stop_or_are_left_out(
    tmp_path: Path, changes: dict[str, bytes | None], message: str
) -> None:
    files: list[tuple[str, bytes]] = []
    for n in range(3):
        members: dict[str, bytes | None] = {"jpg": jpeg(n), "npy": npy([n, 1], "f4"), "cls": b"1"}
        members |= changes if n == 1 else {}
        files += [(f"{n}.{suffix}", data) for suffix, data in members.items() if data is not None]
    write_tar(tmp_path / "a.tar", files)
    options: dict[str, Any] = {"image": ["jpg,jpeg"], "vector": ["npy"], "label": "cls"}
    with pytest.raises(ShardError) as raised:
        run(tmp_path, **options)
    assert message in str(raised.value) and "a.tar sample 1 " in str(raised.value)
    assert "or leave such samples out with `--on-error skip`" in str(raised.value)
    outcome = run(tmp_path, **options, on_error="skip")
    assert (skipped := outcome.manifest.skipped) is not None
    (line,) = skipped.first
    assert line.startswith("a.tar sample 1 ") and line in str(outcome)
    assert "skipped 1:" in str(outcome)
    found = ShardIndex.read(tmp_path / "a.index.npz")
    assert found.keys.tolist() == ["0", "2"] and outcome.manifest.rows("all") == 2
    assert verify(tmp_path).ok


def test_vectors_of_two_widths_and_tars_without_samples(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("0.npy", npy([1, 2], "f4"))])
    write_tar(tmp_path / "b.tar", [("1.npy", npy([1, 2, 3], "f4"))])
    with pytest.raises(ShardError, match="got 3 values in b.tar sample 1 and 2 in a.tar sample 0"):
        run(tmp_path, vector=["npy"])
    for files, message in [
        ([], "b.tar has no sample that can be indexed: it has no files"),
        ([("README", b"")], "none of its 1 files has a key and a suffix"),
        ([("1.npy", b"")], r"all 1 are skipped \(b.tar sample 1 member"),
    ]:
        write_tar(tmp_path / "b.tar", files)
        with pytest.raises(ShardError, match=message):
            run(tmp_path, vector=["npy"], on_error="skip")


@pytest.mark.parametrize(
    ("tars", "given", "splits"),
    [
        (["a-1", "a-0"], None, {"all": ["a-0", "a-1"]}),
        (["training_1", "x-dev.2", "test0"], None, {"train": ["training_1"], "val": ["x-dev.2"]}),
        (["a-0", "b-0"], ["train=a-*", "val=b-*"], {"train": ["a-0"], "val": ["b-0"]}),
        (["a-0", "b-0"], ["x=b-*", "x=a-*"], {"x": ["a-0", "b-0"]}),
        (["train-0", "extra-0"], None, "extra-0\\.tar is in no split, but must be in one"),
        (
            ["train-val-0", "val-1"],
            None,
            "train-val-0\\.tar is in train and val, but must be in one",
        ),
        (
            ["a-0", "b-0"],
            ["x=a-*"],
            "b-0\\.tar is in no split, but must be in one; name the split with",
        ),
        (["a-0"], ["x=a-*", "y=*"], "a-0\\.tar is in x and y"),
        (["a-0"], ["x=b-*"], r"split: no tar in .* matches 'b-\*'; it has a-0.tar"),
        (["a-0"], ["a-*"], r"split must be NAME=PATTERN"),
        (["a-0"], ["../x=a-*"], "'../x' cannot name a view or a split"),
        (["a b (1)", "c"], None, {"all": ["a b (1)", "c"]}),
        (["a+b"], None, "a manifest cannot name it; rename it to letters, digits"),
        ([], None, "pass the folder of tars"),
    ],
)
def test_splits(
    tmp_path: Path, tars: list[str], given: list[str] | None, splits: dict[str, list[str]] | str
) -> None:
    (tmp_path / "other.txt").write_text("")
    for name in tars:
        write_tar(tmp_path / f"{name}.tar", [(f"{name.replace('.', '-')}.npy", npy([1], "f4"))])
    if isinstance(splits, str):
        with pytest.raises((ShardError, SourceError), match=splits):
            run(tmp_path, vector=["npy"], split=given)
        return
    found = run(tmp_path, vector=["npy"], split=given).manifest.splits
    expected = {name: [f"{tar}.tar" for tar in some] for name, some in splits.items()}
    expected |= {"test": ["test0.tar"]} if "test0" in tars else {}
    assert {name: [shard.file for shard in some] for name, some in found.items()} == expected
    assert verify(tmp_path).ok


def test_compressed_tars_are_not_left_out_in_silence(folder: Path) -> None:
    (folder / "more.tar.gz").write_bytes(b"")
    with pytest.raises(ShardError, match="has more.tar.gz, which is compressed"):
        run(folder, image=["jpg"])


def test_a_tar_of_which_nothing_can_be_indexed(tmp_path: Path) -> None:
    write_wds(tmp_path / "a.tar", cats(0, 3))
    write_wds(tmp_path / "b.tar", [{"__key__": "x", "cls": 1}, {"__key__": "y", "cls": 2}])
    remedy = "a manifest lists no tar without rows: fix it, or move it out of the folder"
    message = r"b.tar has no sample .*: all 2 are skipped \(b.tar sample x lacks 'jpg'.*\); "
    with pytest.raises(ShardError, match=message + remedy):
        run(tmp_path, image=["jpg"], label="cls", on_error="skip")
    write_tar(tmp_path / "b.tar", [("README", b"a"), (".x.jpg", b"b")])
    message = "b.tar has no sample .*: none of its 2 files has a key and a suffix; "
    with pytest.raises(ShardError, match=message + remedy):
        run(tmp_path, image=["jpg"], label="cls", on_error="skip")
    assert not list(tmp_path.glob("*.npz"))


def test_tars_that_share_keys(tmp_path: Path) -> None:
    for name in ("train-0", "test-0"):
        write_wds(tmp_path / f"{name}.tar", cats(0, 3))
    message = "test-0.tar sample 000000: duplicate key: train-0.tar has it too.*--prefix-keys true"
    with pytest.raises(ShardError, match=message):
        run(tmp_path, image=["jpg"], label="cls")
    run(tmp_path, image=["jpg"], label="cls", prefix_keys="true")
    keys = ShardIndex.read(tmp_path / "test-0.index.npz").keys.tolist()
    assert keys == ["test-0/000000", "test-0/000001", "test-0/000002"]
    assert verify(tmp_path).ok


def test_verify_finds_what_is_wrong(folder: Path) -> None:
    run(folder, image=["jpg"], label="cls")
    tar = folder / "cats-train-0000.tar"
    good = tar.read_bytes()
    tar.write_bytes(good.replace(jpeg(3), jpeg(3)[:-3] + b"abc"))
    text = str(verify(folder))
    assert "cats-train-0000.tar: altered: its sha256 is" in text
    assert "cats-train-0000.tar sample 000003: member 'jpg' was altered: its crc32 differs" in text
    assert (
        "cats-train-0000.tar sample 000003: member 'jpg' is cut short; it must be a whole" in text
    )
    assert "3 errors; restore it from a good copy or build or index it again" in text
    tar.write_bytes(good[:3800])
    assert "cats-train-0000.tar is cut inside '000000.jpg' (" in str(verify(folder))
    write_wds(tar, cats(1, 5))
    first = ShardIndex.read(folder / "cats-train-0000.index.npz").offsets[0, 0]
    text = str(verify(folder))
    assert (
        f"cats-train-0000.tar sample 000000: no file '000000.jpg' at byte {first}, as its" in text
    )
    assert "6 errors" in text
    tar.write_bytes(good)
    write_wds(folder / "cats-train-0007.tar", cats(50, 1))
    assert verify(folder).faults == [
        "cats-train-0007.tar: extra file, which the manifest does not list"
    ]
    (folder / "cats-train-0007.tar").unlink()
    path = folder / "cats-validation-0000.index.npz"
    found = ShardIndex.read(path)
    known = {name: array for name, array in vars(found).items() if array is not None}
    np.savez(path, **known | {"offsets": found.offsets + 512})
    text = str(verify(folder))
    message = f"sample 000009: no file '000009.jpg' at byte {found.offsets[0, 0] + 512}, as its"
    assert f"cats-validation-0000.tar {message} index says" in text


def sample(number: int, **members: Any) -> dict[str, Any]:
    return {"__key__": f"{number:03d}"} | {key.replace("_", "."): x for key, x in members.items()}


def read_as(folder: Path, samples: list[dict[str, Any]]) -> tuple[list[str], str, list[Any]]:
    folder.mkdir(exist_ok=True)
    write_wds(folder / "a.tar", samples)
    manifest = run(folder).manifest
    assert verify(folder).ok
    return [view.name for view in manifest.views], manifest.labels.kind, labels(folder)


FEW = range(12)
ONE_READING: list[tuple[Any, list[str], list[Any]]] = [
    (lambda n: {"jpg": jpeg(n), "cls": n % 3}, ["image"], [0, 1, 2]),
    (lambda n: {"jpg": jpeg(n), "cls": n % 3, "txt": "abc"[n % 3]}, ["image"], [0, 1, 2]),
    (lambda n: {"jpg": jpeg(n), "cls": n % 3, "txt": f"cat {n}"}, ["image", "text"], [0, 1, 2]),
    (lambda n: {"png": png(n), "txt": f"cat {n}"}, ["image", "text"], []),
    (lambda n: {"jpg": jpeg(n), "txt": "cba"[n % 3]}, ["image"], [2, 1, 0]),
    (lambda n: {"jpg": jpeg(n), "json": {"label": n % 3, "width": 8 + n % 2}}, ["image"], [0, 1]),
    (lambda n: {"jpg": jpeg(n), "json": {"breed": "ab"[n % 2], "id": n}}, ["image"], [0, 1]),
    (lambda n: {"jpg": jpeg(n), "json": {"caption": f"cat {n}"}}, ["image", "caption"], []),
    (
        lambda n: {"jpg": jpeg(n), "txt": f"cat {n}", "json": {"width": n % 3, "height": n % 2}},
        ["image", "text"],
        [],
    ),
    (lambda n: {"jpg" if n % 2 else "png": jpeg(n), "cls": n % 2}, ["image"], [0, 1]),
    (lambda n: {"left_jpg": jpeg(n), "right_png": png(n)}, ["left", "right"], []),
    (lambda n: {"npy": npy([n, 2], "f4"), "id": n % 3}, ["vector"], [0, 1, 2]),
    (lambda n: {"jpg": jpeg(n), "labels_npy": npy([n % 2, 1])}, ["image"], [[0, 1], [1, 1]]),
    (lambda n: {"txt": f"cat {n}", "cls": n % 2}, ["text"], [0, 1]),
]


@pytest.mark.parametrize(("members", "views", "first"), ONE_READING)
def test_tars_with_one_reading_need_no_option(
    tmp_path: Path,
    members: Any,
    views: list[str],
    first: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = [sample(n, **members(n)) for n in FEW]
    found, kind, rows = read_as(tmp_path / "set", samples)
    assert found == views and (kind == "none") == (not first)
    assert not first or rows[: len(first)] == first
    assert f"{tmp_path / 'set'}: read as --" in caplog.text
    assert run(tmp_path / "set").manifest == load_manifest(tmp_path / "set")  # it is complete


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (lambda n: {"jpg": jpeg(n), "id": n % 3, "inx": n % 2}, "id and inx may be the label"),
        (
            lambda n: {"jpg": jpeg(n), "json": {"breed": "ab"[n % 2], "coat of": "xyz"[n % 3]}},
            "json:breed and json:coat of may be the label",
        ),
        (
            lambda n: {"jpg": jpeg(n), "png": png(n), "cls": n % 2},
            "pictures of a sample may be the",
        ),
    ],
)
def test_of_several_readings_the_error_names_one_that_works(
    tmp_path: Path, members: Any, said: str
) -> None:
    (tmp_path / "my set").mkdir()
    write_wds(tmp_path / "my set" / "a.tar", [sample(n, **members(n)) for n in FEW])
    with pytest.raises(SourceError, match=said) as raised:
        run(tmp_path / "my set")
    assert "choose one: try `heron shards index" in str(raised.value)
    command = re.findall("`heron (.*)`", str(raised.value))[0]
    assert main(shlex.split(command)) == 0


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([("0.wav", b"")], "sample 0 has wav; each sample needs a picture (.jpg"),
        (
            [("README", b"")],
            "each sample needs a picture (.jpg, .png, .webp, .gif, ",
        ),
        (
            [("Mr. A.jpg", b"")],
            "has the member ' a.jpg', which must be only an ending, such as jpg:",
        ),
    ],
)
def test_tars_without_a_view(tmp_path: Path, files: list[tuple[str, bytes]], said: str) -> None:
    write_tar(tmp_path / "a.tar", files)
    with pytest.raises(SourceError) as raised:
        run(tmp_path)
    assert said in str(raised.value)


def test_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    command = ["shards", "index", str(folder), "--quiet"]
    assert main([*command, "--image", "jpg", "--label", "cls", "--workers", "1"]) == 0
    assert "train 9 rows in 2 shards" in capsys.readouterr().out
    assert main(command) == 0  # it is read so without being told, and complete
    assert "train 9 rows in 2 shards" in capsys.readouterr().out
    assert f"{folder}: read as --image jpg --label cls" in caplog.text
    assert main(["shards", "verify", str(folder)]) == 0
    sheet = folder / "sheet.png"
    assert main(["shards", "show", str(folder), "--sheet", str(sheet)]) == 0
    shown = capsys.readouterr().out
    assert (
        "\nsha256:" in shown
        and "built from index" in shown
        and "label: cls" in shown
        and sheet.exists()
    )
    with pytest.raises(SystemExit) as status:
        main(["shards", "index", "--help"])
    assert status.value.code == 0
    assert "example" in capsys.readouterr().out


def test_training_on_tars_of_others(tmp_path: Path) -> None:
    shards = tmp_path / "cats"
    shards.mkdir()
    write_wds(shards / "train-0000.tar", cats(0, 40))
    write_wds(shards / "test-0000.tar", cats(40, 20))
    run(shards, image=["jpg"], label="cls")
    tree = merge(
        FRAMES,
        {
            "run": {"dir": str(tmp_path / "run")},
            "data": {
                "path": str(shards),
                "build": None,
                "protocol": {"labelled": 20},
                "batch": {"labelled": 6, "unlabelled": 8},
                "views": [{"stored": "image", "augment": ["flip"]}, {"stored": "image"}],
                "window_rows": 16,
            },
            "model": {"encoder": {"kind": "cnn", "widths": None, "dropout": None}},
            "train": {"epochs": 1, "steps": 2},
        },
    )
    result = pretrain(parse_config(tree))
    assert result["f1_weighted"] >= 0
    losses = [
        row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row
    ]
    assert len(losses) == 2 and np.isfinite(losses).all()
