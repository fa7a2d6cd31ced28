"""Training on tars without an index, by webdataset: what comes, is refused, and is skipped."""

import gc
import os
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Config, parse_config
from heron.pipeline.data.batches import Batch, batches
from heron.pipeline.data.endless import EndlessStreams, open_endless
from heron.pipeline.data.webdataset import EndlessBatches, open_data, share_of
from heron.pipeline.distributed import collectives
from heron.pipeline.pretrain import pretrain
from heron.pipeline.retrieval.embed import embed
from heron.pipeline.training.tracking import read_metrics
from heron.shards.errors import HeronError, ShardError
from tests import ranks
from tests.experiments import merge
from tests.shards import others
from tests.shards.servers import Fault, web

WIDTH, ROWS, TARS = 6, 10, 4  # of a vector, of a tar


def vectors(first: int, count: int, label: bool = True) -> list[dict[str, Any]]:
    """Samples whose vector begins with their number."""
    return [
        {"__key__": f"{n:06d}", "npy": np.full(WIDTH, n, np.float32)}
        | ({"cls": n % 3} if label else {})
        for n in range(first, first + count)
    ]


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    for number in range(TARS):
        others.write_wds(folder / f"a-{number:02d}.tar", vectors(ROWS * number, ROWS))
        unlabelled = vectors(1000 + ROWS * number, ROWS, label=False)
        others.write_wds(folder / f"b-{number:02d}.tar", unlabelled)
    return folder


def config(folder: Path, **data: Any) -> Config:
    tree = {
        "run": {"dir": str(folder.parent / "run")},
        "data": {
            "webdataset": {
                "labelled": f"{folder}/a-{{00..03}}.tar",
                "samples_per_epoch": 40,
                "shuffle": 8,
                "vector": {"npy": WIDTH},
                "label": "cls",
                "classes": 3,
            },
            "batch": {"labelled": 8},
            "views": [{"stored": "vector", "augment": ["noise"]}, {"stored": "vector"}],
        },
        "model": {"encoder": {"kind": "mlp", "widths": [8]}, "projection_width": 4},
        "objective": {"cross_entropy": {}, "weighted_unsupervised": {}},
        "train": {"steps": 3, "cpu_threads": 1},
    }
    return parse_config(merge(tree, {"data": data}))


def both(folder: Path, **stream: Any) -> dict[str, Any]:
    """Two streams, one of them without labels."""
    more = {"unlabelled": [f"{folder}/b-{{00..01}}.tar", f"{folder}/b-{{02..03}}.tar"]}
    return {"webdataset": more | stream, "batch": {"labelled": 7, "unlabelled": 5}}


def opened(config: Config) -> EndlessStreams:
    streams = open_data(config)
    assert isinstance(streams, EndlessStreams)
    return streams


def steps(config: Config, count: int, rank: int = 0, world: int = 1, start: int = 0) -> list[Batch]:
    """Copies of the first batches of a process: their memory is used again."""
    source = share_of(open_data(config), config, rank, world, start)
    found = batches(source, start, start + count, config.data.workers, pin=False)
    return [batch.to(torch.device("cpu"))._each(torch.clone) for batch in found]


def numbers(found: Sequence[Batch]) -> list[int]:
    return [int(x) for batch in found for x in batch.stored["vector"][:, 0]]


@pytest.mark.parametrize(("workers", "size"), [(0, 8), (2, 10)])  # a pass is whole batches
def test_a_pass_has_every_sample_once_with_its_label(tars: Path, workers: int, size: int) -> None:
    found = steps(config(tars, workers=workers, batch={"labelled": size}), 40 // size)
    assert sorted(numbers(found)) == list(range(ROWS * TARS))
    assert numbers(found) != list(range(ROWS * TARS))
    for batch in found:
        assert torch.equal(batch.targets.argmax(1), batch.stored["vector"][:, 0].long() % 3)
        assert batch.sizes == [size] and batch.targets.sum(1).eq(1).all()
    assert torch.cat([batch.indices for batch in found]).tolist() == list(range(40))
    assert len(set(torch.cat([batch.rng_keys for batch in found]).tolist())) == 40


def test_shares_of_processes_are_apart_and_uneven_ones_never_run_dry(tars: Path) -> None:
    given = config(tars, **both(tars))
    shares = [steps(given, 6, rank, 2) for rank in range(2)]
    assert [share[0].sizes for share in shares] == [[3, 2], [4, 3]]
    seen = [{n for n in numbers(share) if n < 1000} for share in shares]
    assert not seen[0] & seen[1] and len(seen[0]) == 18 and len(seen[1]) == 20
    indices = [torch.cat([batch.indices for batch in share]) for share in shares]
    assert sorted(torch.cat(indices).tolist()) == list(range(6 * 12))
    for batch in shares[0] + shares[1]:
        assert (batch.stored["vector"][batch.labelled :, 0] >= 1000).all()


def test_resampling_draws_with_replacement_whatever_the_number_of_tars(tars: Path) -> None:
    alone = {"labelled": f"{tars}/a-00.tar"}
    with pytest.raises(
        ConfigError, match=r"labelled has 1 tars for 6 reading processes \(2 with 3"
    ):
        steps(config(tars, webdataset=alone, workers=3), 1, 0, 2)
    given = config(tars, webdataset=alone | {"resampled": True})
    both_ = [numbers(steps(given, 4, rank, 2)) for rank in range(2)]
    assert all(set(found) <= set(range(ROWS)) for found in both_) and both_[0] != both_[1]


def test_a_run_that_goes_on_draws_another_order(tars: Path) -> None:
    given = config(tars)
    assert numbers(steps(given, 3)) == numbers(steps(given, 3))
    assert numbers(steps(given, 3, start=1)) != numbers(steps(given, 3))


def test_a_run_is_resumed_at_its_step(tars: Path) -> None:
    tree = config(tars).model_dump(mode="json")
    pretrain(parse_config(tree))
    again = {"run": {"resume": "auto"}, "train": {"steps": 5}}
    assert pretrain(parse_config(merge(tree, again)))["steps"] == 5
    rows = read_metrics(tars.parent / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(5))


def train(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    result = pretrain(config(folder, **changes))
    source = share_of(open_data(given := config(folder, **changes)), given,
                      collectives.rank(), collectives.world_size(), 0)  # fmt: skip
    first = next(batches(source, 0, 1, 0, pin=False))
    gathered = collectives.gather_objects(numbers([first]))
    return {"steps": result["steps"], "gathered": gathered}


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_trains_on_one_process_and_on_two(tars: Path, world: int) -> None:
    found = ranks.run(world, train, tars, both(tars))
    assert [one["steps"] for one in found] == [3] * world
    gathered = [n for share in found[0]["gathered"] for n in share]
    assert len(gathered) == len(set(gathered)) == 12 and len(found[0]["gathered"]) == world
    rows = [row for row in read_metrics(tars.parent / "run" / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 3 and all(np.isfinite(row["loss"]) for row in rows)


def test_pictures_are_scored_on_an_indexed_set_that_says_what_lies_in_a_sample(
    tmp_path: Path,
) -> None:
    held, folder = tmp_path / "held", tmp_path / "tars"
    held.mkdir()
    folder.mkdir()
    others.write_wds(held / "test-0.tar", others.cats(0, 12))
    others.write_wds(held / "train-0.tar", others.cats(20, 12))
    others.run(held, image=["jpg"], label="cls")
    for number in range(2):
        others.write_wds(folder / f"a-{number:02d}.tar", others.cats(100 + 12 * number, 12))
    given = config(
        folder,
        path=str(held),
        protocol={"test": "test"},
        webdataset={"labelled": f"{folder}/a-{{00..01}}.tar", "samples_per_epoch": 16}
        | dict.fromkeys(["vector", "label", "classes"]),
        views=[{"stored": "image", "augment": ["crop"]}, {"stored": "image"}],
    )
    tree = given.model_dump(mode="json")
    tree["model"] = {"encoder": {"kind": "cnn", "channels": [4]}, "projection_width": 4}
    result = pretrain(parse_config(tree))
    assert result["skipped_rows"] == 0 and 0 <= result["auc_macro"] <= 1
    (batch,) = steps(parse_config(tree), 1)
    assert batch.stored["image"].shape == (8, 8, 8, 3) and batch.stored["image"].float().std() > 1


def test_a_command_and_a_server(tars: Path) -> None:
    expected = sorted(numbers(steps(config(tars), 5)))
    piped = {"labelled": f"pipe:cat {tars}/a-{{00..03}}.tar"}
    assert sorted(numbers(steps(config(tars, webdataset=piped), 5))) == expected
    with web({path.name: path.read_bytes() for path in tars.iterdir()}) as server:
        served = {"labelled": server.url + "/a-{00..03}.tar"}
        server.faults["a-02.tar"] = [Fault("drop", after=3000)]
        assert sorted(numbers(steps(config(tars, webdataset=served), 5))) == expected
        assert not server.faults["a-02.tar"]
        served = {"labelled": server.url + "/c-{00..03}.tar"}
        with pytest.raises(ShardError, match=r"127.0.0.1:\d+: no such file; expected a tar"):
            steps(config(tars, webdataset=served), 1)
        server.redirects["a-00.tar"] = "http://localhost:1/a-00.tar"
        served = {"labelled": server.url + "/a-00.tar"}
        with pytest.raises(ShardError, match="the server redirects to http://localhost:1"):
            steps(config(tars, webdataset=served), 1)


def test_nothing_is_left_of_a_command_that_nobody_reads_on(tars: Path) -> None:
    said = tars / "pid"
    command = f"pipe:echo $$ > {said}; cat {tars}/a-00.tar; sleep 300"
    given = config(tars, webdataset={"labelled": command, "resampled": True, "shuffle": 0})
    reading: Any = iter(EndlessBatches(opened(given), given, 0, 1, 0)._pipeline("labelled"))
    next(reading)
    os.kill(int(said.read_text()), 0)
    reading.close()
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


MEMBER = 512 * 4  # bytes of a small file, its header and a pax header with its time
FAULTS: dict[
    str, tuple[Callable[[bytes], bytes], str]
] = {  # what becomes of a-01.tar, what is said
    "cut in a file": (
        lambda data: data[: MEMBER - 512],
        r"is no whole tar \(unexpected end of data\)",
    ),
    "cut in a sample": (
        lambda data: data[: 5 * MEMBER],
        r"is cut: it has no end mark \(byte 10240\)",
    ),
    "cut in its end": (
        lambda data: data[: 2 * ROWS * MEMBER + 512],
        r"is cut: it has no end mark \(byte 40960\)",
    ),
    "a bad header": (
        lambda data: data[: 4 * MEMBER] + b"x" * 512 + data[4 * MEMBER + 512 :],
        r"has a bad header, or goes on after its end mark \(byte 8192\)",
    ),
    "compressed": (lambda data: b"\x1f\x8b" + data, r"is compressed by gzip .* through a command"),
    "empty": (lambda data: b"", r"is no whole tar \(empty file\)"),
    "no sample": (lambda data: bytes(10240), "no sample in it; expected some"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_tar_is_named_and_stops_or_is_counted(tars: Path, name: str) -> None:
    damage, message = FAULTS[name]
    path = tars / "a-01.tar"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ShardError, match=f"a-01.tar: {message}"):
        steps(config(tars), 5)
    found = steps(config(tars, on_error="skip", max_bad_fraction=0.3), 6)
    lost = {key: fault for batch in found for key, fault in batch.lost.items()}
    assert len(lost) == 1 and all(key < 0 and "a-01.tar" in fault for key, fault in lost.items())
    with pytest.raises(ShardError, match="1 of 4 tars cannot be read, more than data.max_bad_fra"):
        steps(config(tars, on_error="skip", max_bad_fraction=0.2), 6)


BAD: dict[str, tuple[dict[str, Any], str]] = {  # a sample's members, and what is said of it
    "a missing member": ({"cls": "1"}, r"lacks 'npy'; found \['cls'\]"),
    "no label": ({"npy": None, "txt": "a"}, r"lacks the label 'cls'; found \['npy', 'txt'\]"),
    "a class beyond": ({"npy": None, "cls": "3"}, "is of class 3; expected one of 3"),
    "a word": ({"npy": None, "cls": "cat"}, "expected a class number"),
    "another width": ({"npy": [1.0], "cls": "1"}, r"member 'npy' is float32 \(1,\); expected"),
    "no number": ({"npy": [np.nan] * 6, "cls": "1"}, "has a NaN or infinite value"),
    "a pickle": (
        {"npy": np.array([{}] * 6, object), "cls": "1"},
        "an array of Python objects is a pickle, never decoded",
    ),
}


def payload(value: Any, number: int) -> bytes:
    """A text, or an array; None: a vector of a number."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray):
        return others.npy(value)
    return others.npy(value or [number] * WIDTH, "float32")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sample_is_named_and_gives_its_place_to_the_next(tars: Path, name: str) -> None:
    members, message = BAD[name]
    good = {"npy": None, "cls": "0"}
    files = [(f"bad.{suffix}", payload(value, 7)) for suffix, value in members.items()]
    files += [(f"good.{suffix}", payload(value, 99)) for suffix, value in good.items()]
    others.write_tar(tars / "a-04.tar", files)
    more = {"labelled": f"{tars}/a-{{00..04}}.tar", "shuffle": 0}
    with pytest.raises(ShardError, match=f"a-04.tar sample bad: .*{message}"):
        steps(config(tars, webdataset=more), 5)
    given = config(tars, webdataset=more, on_error="skip", max_bad_fraction=0.1)
    found = steps(given, 12)
    lost = {key: fault for batch in found for key, fault in batch.lost.items()}
    assert len(lost) == 1  # met twice, and one
    assert 99 in numbers(found) and all(np.isfinite(numbers(found)))
    with pytest.raises(ShardError, match="1 samples cannot be read, more than data.max_bad_frac"):
        steps(config(tars, webdataset=more, on_error="skip", max_bad_fraction=0.01), 12)


def test_skipped_samples_are_told_and_counted_by_the_run(
    tars: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tars / "a-01.tar").unlink()
    result = pretrain(config(tars, on_error="skip", max_bad_fraction=0.3))
    assert result["skipped_rows"] == 1
    said = capsys.readouterr().out
    assert f"skipped: {tars}/a-01.tar: No such file or directory; expected a tar" in said
    assert "labelled: 8 samples a batch of 4 tars without an index, by passes over each" in said
    assert "an endless stream: its batches depend on the numbers of processes and of work" in said
    assert "no protocol holds, no sample has a number; nothing scores" in said


def test_where_no_sample_can_be_read_a_run_ends(tars: Path) -> None:
    nothing = {"labelled": f"{tars}/b-{{00..03}}.tar", "samples_per_epoch": 10**9}
    given = config(tars, webdataset=nothing, on_error="skip", max_bad_fraction=1.0)
    with pytest.raises(
        ShardError, match="or 1,000 one after the other; the last fault: .*lacks th"
    ):
        steps(given, 1)
    gone = {"labelled": f"{tars}/gone-{{00..03}}.tar"}
    with pytest.raises(ShardError, match="a pass over the tars of a reading process had no sample"):
        steps(config(tars, webdataset=gone, on_error="skip", max_bad_fraction=1.0), 1)


def test_a_command_that_fails_is_named(tars: Path) -> None:
    failing = {"labelled": f"pipe:cat {tars}/a-00.tar; exit 3", "resampled": True}
    with pytest.raises(
        ShardError, match="^pipe:cat .*: the command ended with status 3; expected 0"
    ):
        steps(config(tars, webdataset=failing), 9)
    failing["labelled"] = "pipe:no-such-command-here 2>/dev/null"
    with pytest.raises(ShardError, match=r"\(empty file\); the command ended with status 127"):
        steps(config(tars, webdataset=failing), 1)


def test_links_and_long_tars_are_refused(tars: Path) -> None:
    others.write_tar(tars / "a-00.tar", [others.info("x.npy", type=tarfile.SYMTYPE, linkname="y")])
    with pytest.raises(ShardError, match=r"a-00.tar: 'x.npy' is a symbolic link"):
        steps(config(tars), 5)
    with pytest.raises(ShardError, match="has more than 5,000 bytes; .* data.webdataset.tar_bytes"):
        steps(config(tars, webdataset={"labelled": f"{tars}/a-01.tar", "tar_bytes": 5000}), 5)


REFUSED = [
    ({"negatives": {"mine": 2}}, "negatives.mine is 2, but data.webdataset streams samples with"),
    ({"objective": {"pico": {}}}, "objective.pico remembers rows, but .* none comes again under"),
    ({"evaluate": {"baselines": True}}, "evaluate.baselines is true, but"),
    ({"data": {"protocol": {"complementary": 1}}}, "drawn by the number of the row; leave it out"),
    ({"data": {"canonical_streams": 2}}, "canonical_streams is 2, but .* nothing plans the order"),
    ({"data": {"standardise": True}}, "there are no statistics but those of data.path"),
    ({"data": {"batch": {"labelled": "all"}}}, "'all', but .* nobody knows how many"),
    ({"data": {"batch": {"unlabelled": 4}}}, "unlabelled is 4, and .*unlabelled has no tars"),
    ({"data": {"batch": {"labelled": 41}}}, "labelled is 41; expected 2 to 40"),
    ({"data": {"path": "x"}}, "webdataset has image, vector, label or classes beside path"),
    ({"data": {"webdataset": None}}, "path is missing; expected a folder of shards or a URL"),
    ({"data": {"webdataset": {"vector": None}}}, "has neither image nor vector; expected the mem"),
    ({"data": {"webdataset": {"classes": None}}}, "has label cls and 0 classes; expected both"),
    ({"data": {"webdataset": {"label": "pyd"}}}, "label: no label can be read from 'pyd'"),
    ({"data": {"webdataset": {"vector": {"pth": 3}}}}, "no such view can be read from 'pth'"),
    ({"data": {"webdataset": {"labelled": "a-{0..99999999}.tar"}}}, "more than 1,048,576 tars"),
    ({"data": {"webdataset": {"labelled": "https://h/a.tar?X-Amz-Signature=1"}}}, "credentials in"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_needs_an_index_is_refused_by_name(
    tars: Path, changes: dict[str, Any], message: str
) -> None:
    tree = config(tars).model_dump(mode="json", exclude_defaults=True)
    if "objective" in changes:
        tree["objective"] = None
    with pytest.raises(HeronError, match=message):
        open_endless(parse_config(merge(tree, changes)))


def test_labels_of_other_kinds(tars: Path) -> None:
    files = [("x.npy", payload(None, 1)), ("x.json", b'{"is": ["b", "c"]}')]
    files += [("y.npy", payload(None, 2)), ("y.json", b'{"is": [1, 0, 0]}')]
    others.write_tar(tars / "a-00.tar", files)
    stream = {"labelled": f"{tars}/a-00.tar", "label": "json:is", "classes": ["a", "b", "c"]}
    given = config(tars, webdataset=stream | {"label_kind": "multi_label"})
    (batch,) = steps(given, 1)
    found = {n: row.tolist() for n, row in zip(numbers([batch]), batch.targets, strict=True)}
    assert found == {1: [0, 1, 1], 2: [1, 0, 0]}
    with pytest.raises(ShardError, match="has as its label a .*; expected a multi_class one"):
        steps(config(tars, webdataset=stream), 1)


def test_the_experiment_of_the_guide(tars: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    section = guide.partition("## Endless streams")[2].partition("\n## ")[0]
    first, second = re.findall(r"(?:    data:\n(?:      .*\n)+)", section)
    rng = np.random.default_rng(0)
    members = {"cls": "1", "sensors.npy": rng.normal(size=128).astype(np.float32)}
    others.write_wds(
        tars / "c.tar", [{"__key__": str(n), "jpg": others.jpeg(n)} | members for n in range(20)]
    )
    data = yaml.safe_load(first)["data"]
    assert "{0000..0999}" in data["webdataset"]["labelled"]
    data["webdataset"] |= {"labelled": f"{tars}/c.tar", "shuffle": 10}
    data |= {"batch": {"labelled": 4}, "decode_size": 8}
    data["views"] = [view | {"size": 8} for view in data["views"]]
    tree = config(tars).model_dump(mode="json")
    (batch,) = steps(parse_config(tree | {"data": data}), 1)
    assert batch.stored["image"].shape == (4, 8, 8, 3) and batch.targets[:, 1].all()
    data = yaml.safe_load(second)["data"] | {"batch": {"labelled": 4}, "views": data["views"]}
    assert parse_config(tree | {"data": data}).data.protocol.test == "unlabelled"


def test_rows_are_embedded_of_a_set_that_is_given(tars: Path) -> None:
    given = config(tars)
    pretrain(given)
    run, out = Path(given.run.dir), tars.parent / "embeddings"
    with pytest.raises(ConfigError, match="names no data set; expected one with the same members"):
        embed(run, out, progress=False)
    held = tars.parent / "held"
    held.mkdir()
    others.write_wds(held / "all.tar", vectors(50, 5))
    others.run(held, vector=["npy"], label="cls")
    found = embed(run, out, overrides=[f"data.path={held}"], progress=False)
    assert len(found.samples.rows) == 5
