"""A checkpoint over a data set: every row once, on any number of processes; a crash resumes.

accelerate launch --num_processes 8 -m heron.launch.cli embed runs/celeba --out embeddings/celeba
"""

import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import torch

from heron.pipeline.config.data import Data
from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.config.experiment import Config, load_run_config
from heron.pipeline.data.plan import Rows
from heron.pipeline.data.protocol import assign
from heron.pipeline.data.reader import Reader
from heron.pipeline.distributed.agreement import differences
from heron.pipeline.distributed.collectives import gather_objects, rank
from heron.pipeline.distributed.launch import start_processes
from heron.pipeline.retrieval.embedder import Choice, Embedder, PartManifest
from heron.pipeline.retrieval.embeddings import (
    FORMAT,
    LAYERS,
    PLAN,
    Embeddings,
    EmbeddingsManifest,
    Layer,
    LayerRecord,
    Role,
)
from heron.pipeline.retrieval.layers import EmbeddingModel, refuse_options
from heron.pipeline.retrieval.samples import Samples
from heron.pipeline.training.pretrained import locate, weights_sha256
from heron.shards.artefact import MANIFEST, parse_json
from heron.shards.atomic import save_json
from heron.shards.errors import HeronError, shown
from heron.shards.store import is_remote

ROLES: tuple[Role, ...] = get_args(Role)
T = TypeVar("T")


def embed(
    run: str | Path,  # folder of a run or of a checkpoint
    out: str | Path,  # folder to write; what an earlier call of the same finished is kept
    choice: Choice | None = None,
    overrides: Sequence[str] = (),  # of the run's configuration, such as `data.path=data/other`
    progress: bool = True,
) -> Embeddings:
    """Embeds a data set; every process of a launch must call it.

    The run may be of others: parts of its own by dotted path are imported from the Python path,
    never from its folder; no data set is built, and none is fetched that `overrides` do not name.

    Raises:
        RetrievalError: `out` holds other embeddings, the data does not fit the model, or an
            embedding is not finite: names the samples.
        CheckpointError: there is no checkpoint.
        ConfigError: an override does not fit, or there is no such split.
        ShardError: the data set is missing or damaged.
    """
    choice, out = choice or Choice(), Path(out)
    if choice.part_rows < 1:
        raise RetrievalError(f"part_rows is {choice.part_rows}; expected at least 1 row a file")
    checkpoint = locate(run)
    if any(given.startswith("data.path=") for given in overrides):  # its manifest says all
        overrides = [*overrides, *ALONE]
    config = load_run_config(checkpoint / "config.yaml", overrides)
    device = start_processes(config).device
    together(lambda: check_data(config.data, overrides))
    embedder, plan = together(lambda: _open(checkpoint, config, device, out, choice))
    for number, other in enumerate(gather_objects(plan)):
        if differ := differences(plan, other):
            raise RetrievalError(
                f"rank {number} would embed something else: {'; '.join(differ)}; expected the same "
                "on all; is the run still training? give a checkpoint's folder"
            )
    together(lambda: _begin(embedder, plan) if rank() == 0 else None)
    together(lambda: embedder.run_all(progress))
    records = gather_objects(together(lambda: {n: embedder.record(n) for n in embedder.mine}))
    together(lambda: _finish(embedder, plan, str(run), records) if rank() == 0 else None)
    return Embeddings.open(out, verify=False)  # it has just been written


def together(work: Callable[[], T]) -> T:
    """Returns what some work gives; a fault of one process is raised on all, which would wait."""
    fault: Exception | None = None
    try:
        found = work()
    except (HeronError, OSError) as error:
        fault = error
    texts = gather_objects("" if fault is None else str(fault))
    if fault is not None:
        raise fault
    for number, text in enumerate(texts):
        if text:
            raise RetrievalError(f"rank {number}: {text}")
    return found


def _open(
    checkpoint: Path,
    config: Config,
    device: torch.device,
    out: Path,
    choice: Choice,
) -> tuple[Embedder, dict[str, Any]]:
    """Opens model, data and rows; the plan is what tells this embedding from others."""
    model = EmbeddingModel.open(checkpoint, config, device)
    rows, layers = _rows(model.reader, config, choice), _layers(model, choice)
    seen = config.data.model_dump(mode="json", include={"views", "standardise", "draft"})
    seen["canvas"] = config.data.decode_size  # the name in plans on disk
    plan = {
        "checkpoint": weights_sha256(checkpoint),
        "data_fingerprint": model.reader.manifest.fingerprint,
        "rows": len(rows),
        "rows_sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
        "split": choice.split,
        "role": choice.role,
        "seen": seen,
        "batch": config.evaluate.batch,
        "dtype": choice.dtype,
        "layers": list(layers),
        "part_rows": choice.part_rows,
        "precision": config.train.precision,
    }
    return Embedder(model, config, rows, out, layers, choice.part_rows), plan


ALONE = [  # beside `data.path=`: nothing of the run's own data set
    *("data.webdataset=null", "data.sources=null"),
    *("data.protocol.hide_views={}", "data.protocol.hide_labels=0"),
]


def check_data(data: Data, overrides: Sequence[str]) -> None:
    """Refuses a data set that is not there, or is at an address that only the run names.

    A run's configuration may be of others: it starts no build, and nothing is fetched by it.
    """
    remote = [path for path in data.paths if is_remote(path)]
    if remote and not any(given.startswith("data.path=") for given in overrides):
        raise RetrievalError(
            f"the run names the data set {remote[0]}, which is fetched only when you give it; "
            f"expected data.path={remote[0]} on the command line"
        )
    refuse_options(data, any(given.startswith("data.storage_options") for given in overrides))
    if data.build is not None and "://" not in data.path and not Path(data.path).exists():
        words = [f"--{key}={value}" for key, value in data.build.items() if key != "source"]
        command = ["heron", "shards", "build", str(data.build.get("source")), "--out", data.path]
        raise RetrievalError(
            f"{data.path} is not there; expected the data set of the run, or another by data.path; "
            f"if you trust the run, build it with: {shlex.join(command + words)}"
        )


def _rows(reader: Reader, config: Config, choice: Choice) -> Rows:
    if choice.role is not None:
        if choice.role not in ROLES:
            raise RetrievalError(f"unknown role '{choice.role}'; expected {', '.join(ROLES)}")
        split = choice.split or config.data.split
        rows = getattr(assign(reader, split, config.data.protocol), choice.role)
    elif choice.split is not None:
        rows = reader.split_rows(choice.split)
    else:
        rows = np.arange(reader.starts[-1])
    if not len(rows):
        raise RetrievalError(
            f"{config.data.path} has no row of role {choice.role}, split {choice.split}; expected "
            "some; see `heron shards show`"
        )
    return np.sort(rows).astype(np.int64)


def _layers(model: EmbeddingModel, choice: Choice) -> dict[Layer, LayerRecord]:
    """Returns the layers to write, with their widths."""
    if choice.dtype not in ("float32", "float16"):
        raise RetrievalError(f"unknown dtype '{choice.dtype}'; expected float32 or float16")
    widths = model.widths
    for name in choice.layers or ():
        if name not in widths:
            raise RetrievalError(
                f"the model has no layer '{name}'; found {', '.join(widths)}; expected one of them"
            )
    asked = [name for name in LAYERS if name in (choice.layers or widths)]
    return {
        name: LayerRecord(dim=widths[name], dtype=choice.dtype, views=model.model.classified)
        for name in asked
    }


def _begin(embedder: Embedder, plan: dict[str, Any]) -> None:
    """Makes the folder, or finds in it a part of the same.

    Raises:
        RetrievalError: it holds something else, or two of the rows have one key.
    """
    out = embedder.out
    samples_of(embedder.reader, embedder.rows).refuse_duplicates()
    out.mkdir(parents=True, exist_ok=True)
    path = out / PLAN
    if path.exists():
        try:
            if not isinstance(begun := parse_json(path.read_bytes()), dict):
                raise ValueError(f"found {shown(begun)}")
        except ValueError as error:
            raise RetrievalError(
                f"{path} is no plan: {error}; expected the plan of an unfinished embedding; remove "
                "the folder, or give another --out"
            ) from None
        if differ := differences(plan, begun):
            raise RetrievalError(
                f"{out} holds embeddings of another kind: {'; '.join(differ)}; expected the same, "
                "to go on with; give another --out, or remove the folder"
            )
        return
    if found := sorted(p.name for p in out.iterdir()):
        raise RetrievalError(
            f"{out} holds {', '.join(found[:3])}; expected an empty folder; give another --out"
        )
    save_json(path, plan)


def _finish(
    embedder: Embedder,
    plan: dict[str, Any],
    run: str,
    records: Sequence[Mapping[int, PartManifest]],
) -> None:
    """Writes the samples, and last the manifest."""
    by_number = {number: found for some in records for number, found in some.items()}
    lost = {row: why for found in by_number.values() for row, why in found.lost.items()}
    kept = embedder.rows[~np.isin(embedder.rows, np.array(list(lost), np.int64))]
    EmbeddingsManifest(
        format=FORMAT,
        run=run,
        checkpoint=plan["checkpoint"],
        data=embedder.config.data.path,
        data_fingerprint=plan["data_fingerprint"],
        precision=plan["precision"],
        rows=len(kept),
        layers=embedder.layers,
        parts=[by_number[number].part for number in range(len(by_number))],
        samples=samples_of(embedder.reader, kept).save(embedder.out),
        lost=lost,
    ).write(embedder.out / MANIFEST)


def samples_of(reader: Reader, rows: Rows) -> Samples:
    """Returns keys and labels of some rows of a data set."""
    labels = reader.manifest.labels
    known = reader.known(rows)
    if labels.kind == "complementary":  # a class is known where the others are ruled out
        known &= reader.targets(rows).sum(1) == len(labels.names) - 1
    if reader.unknown:  # what is not known of all labels of a row is none of its
        known &= (reader.labels(rows) != labels.unlabelled).all(1)
    targets = np.zeros((len(rows), len(labels.names)), np.uint8)
    if known.any():
        targets[known] = reader.truth(rows[known])
    keys = np.array([key.encode() for key in reader.sample_keys(rows)], np.bytes_)
    return Samples(keys, rows, targets, known, labels.names, labels.kind)
