"""Training on tars without an index, by webdataset: what comes, in which order."""

import gc
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from heron.api.job import pretrain
from heron.base.errors import ConfigError, ShardError
from heron.data.batches import batches
from heron.data.endless import EndlessBatches
from heron.distributed import collectives
from heron.experiment.config import parse_config
from heron.experiment.open_data import open_data, open_process_batches
from heron.retrieval.embed import embed
from heron.training.tracking import read_metrics
from tests import ranks
from tests.data.endless import ROWS, TARS, both, config, numbers, opened, payload, steps, vectors
from tests.experiments import merge
from tests.shards import others
from tests.shards.servers import Fault, web


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
    with pytest.raises(ConfigError, match="has 1 tars, but 6 processes read \\(2 with 3"):
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
    source = open_process_batches(open_data(given := config(folder, **changes)), given,
                      collectives.rank(), collectives.world_size(), 0)  # fmt: skip
    first = next(batches(source, 0, 1, 0))
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
        with pytest.raises(ShardError, match=r"127.0.0.1:\d+: no such file"):
            steps(config(tars, webdataset=served), 1)
        server.redirects["a-00.tar"] = "http://localhost:1/a-00.tar"
        served = {"labelled": server.url + "/a-00.tar"}
        with pytest.raises(ShardError, match="the server redirects to http://localhost:1"):
            steps(config(tars, webdataset=served), 1)


def test_nothing_is_left_of_a_command_that_nobody_reads_on(tars: Path) -> None:
    said = tars / "pid"
    command = f"pipe:echo $$ > {said}; cat {tars}/a-00.tar; sleep 300"
    given = config(tars, webdataset={"labelled": command, "resampled": True, "shuffle": 0})
    reading: Any = iter(
        EndlessBatches(opened(given), given.data, given.seed, 0, 1, 0)._pipeline("labelled")
    )
    next(reading)
    os.kill(int(said.read_text()), 0)
    reading.close()
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


def test_labels_of_other_kinds(tars: Path) -> None:
    files = [("x.npy", payload(None, 1)), ("x.json", b'{"is": ["b", "c"]}')]
    files += [("y.npy", payload(None, 2)), ("y.json", b'{"is": [1, 0, 0]}')]
    others.write_tar(tars / "a-00.tar", files)
    stream = {"labelled": f"{tars}/a-00.tar", "label": "json:is", "classes": ["a", "b", "c"]}
    given = config(tars, webdataset=stream | {"label_kind": "multi_label"})
    (batch,) = steps(given, 1)
    found = {n: row.tolist() for n, row in zip(numbers([batch]), batch.targets, strict=True)}
    assert found == {1: [0, 1, 1], 2: [1, 0, 0]}
    with pytest.raises(ShardError, match="must have a multi_class label, got a .*"):
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
    with pytest.raises(ConfigError, match="and names no data set; pass one with the same members:"):
        embed(run, out, progress=False)
    held = tars.parent / "held"
    held.mkdir()
    others.write_wds(held / "all.tar", vectors(50, 5))
    others.run(held, vector=["npy"], label="cls")
    found = embed(run, out, overrides=[f"data.path={held}"], progress=False)
    assert len(found.samples.rows) == 5
