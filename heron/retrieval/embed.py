"""Embeds a data set with a checkpoint: every row once, on any number of processes, resumably.

accelerate launch --num_processes 8 -m heron embed runs/celeba --out embeddings/celeba
"""

import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import torch

from heron.config.data import Data
from heron.config.errors import RetrievalError
from heron.config.experiment import Config, load_config
from heron.data.dataset import open_reader
from heron.data.protocol import assign, drop_partial, hide_labels
from heron.data.reader import Reader
from heron.data.rows import Roles, Rows
from heron.distributed.agreement import differences
from heron.distributed.collectives import gather_objects, rank
from heron.retrieval.embedder import Choice, Embedder, PartManifest
from heron.retrieval.embeddings import (
    FORMAT,
    LAYERS,
    PLAN,
    Embeddings,
    EmbeddingsManifest,
    Layer,
    LayerRecord,
    Role,
)
from heron.retrieval.layers import EmbeddingModel, refuse_options
from heron.retrieval.samples import Samples
from heron.shards.artefact import MANIFEST, parse_json
from heron.shards.atomic import aside_name, make_room, refuse_taken, save_json
from heron.shards.errors import HeronError, short_repr
from heron.shards.store import is_remote
from heron.training.launch import start_processes
from heron.training.pretrained import locate, weights_sha256

ROLES: tuple[Role, ...] = get_args(Role)
T = TypeVar("T")


def embed(
    run: str | Path,  # folder of a run or of a checkpoint
    out: str | Path,  # folder to write; keeps what an earlier identical call has finished
    choice: Choice | None = None,
    overrides: Sequence[str] = (),  # of the run's configuration, such as `data.path=data/other`
    progress: bool = True,
    overwrite: bool = False,  # move what `out` holds aside, and begin anew
) -> Embeddings:
    """Embeds a data set; every process of a launch must call it.

    The run need not be trusted: components that it names by dotted path are imported from the
    Python path, never from its folder; no data set is built, nor any fetched unless `overrides`
    name it.

    Raises a RetrievalError if `out` holds other embeddings, the data does not fit the model, or
    embeddings are not finite; a CheckpointError, ConfigError or ShardError if the model, an
    override or split, or the data set is missing or damaged.
    """
    choice, out = choice or Choice(), Path(out)
    if choice.part_rows < 1:
        raise RetrievalError(f"part_rows is {choice.part_rows}; expected at least 1 row a file")
    checkpoint = locate(run)
    config = load_for_data(checkpoint / "config.yaml", overrides)
    device = start_processes(config).device
    _fail_together(lambda: check_data(config.data, overrides))
    embedder, plan = _fail_together(lambda: _open(checkpoint, config, device, out, choice))
    for other_rank, other_plan in enumerate(gather_objects(plan)):
        if differ := differences(plan, other_plan):
            raise RetrievalError(
                f"rank {other_rank} would embed something else: {'; '.join(differ)}; expected the "
                "same on all; is the run still training? give a checkpoint's folder"
            )
    _fail_together(lambda: _start_folder(embedder, plan, overwrite) if rank() == 0 else None)
    _fail_together(lambda: embedder.run_all(progress))
    parts = _fail_together(lambda: {n: embedder.record(n) for n in embedder.part_numbers})
    by_rank = gather_objects(parts)
    _fail_together(lambda: _finish(embedder, plan, str(run), by_rank) if rank() == 0 else None)
    return Embeddings.open(out, verify=False)  # it has just been written


def _fail_together(work: Callable[[], T]) -> T:
    """Returns the result of `work`; a fault in one process is raised in all, lest they hang."""
    fault: Exception | None = None
    try:
        result = work()
    except (HeronError, OSError) as error:
        fault = error
    texts = gather_objects("" if fault is None else str(fault))
    if fault is not None:
        raise fault
    for other_rank, text in enumerate(texts):
        if text:
            raise RetrievalError(f"rank {other_rank}: {text}")
    return result


def _open(
    checkpoint: Path,
    config: Config,
    device: torch.device,
    out: Path,
    choice: Choice,
) -> tuple[Embedder, dict[str, Any]]:
    """Opens model, data and rows; the plan identifies this embedding, to resume it."""
    model = EmbeddingModel.open(checkpoint, config, device)
    rows, layers = _rows(model.reader, config, choice), _layers(model, choice)
    inputs = config.data.model_dump(mode="json", include={"views", "standardise", "draft"})
    inputs["canvas"] = config.data.decode_size  # the name in plans on disk
    plan = {
        "checkpoint": weights_sha256(checkpoint),
        "data_fingerprint": model.reader.manifest.fingerprint,
        "rows": len(rows),
        "rows_sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
        "split": choice.split,
        "role": choice.role,
        "seen": inputs,
        "batch": config.evaluate.batch,
        "dtype": choice.dtype,
        "layers": list(layers),
        "part_rows": choice.part_rows,
        "precision": config.train.precision,
    }
    return Embedder(model, config, rows, out, layers, choice.part_rows), plan


# With a `data.path` of the caller's, the manifest there says everything, not the run's settings.
DROP_RUN_DATA = {
    "data.webdataset": "null",
    "data.sources": "null",
    "data.protocol.hide_views": "{}",
    "data.protocol.hide_labels": "0",
}


def load_for_data(path: Path, overrides: Sequence[str]) -> Config:
    """Returns a run's experiment; a new `data.path` drops what binds the run to its data set.

    Raises a ConfigError if an override does not fit.
    """
    keys = {override.partition("=")[0] for override in overrides}
    if "data.path" not in keys:
        return load_config(path, overrides)

    def load(dropped: Mapping[str, str]) -> Config:
        settings = [f"{key}={value}" for key, value in dropped.items() if key not in keys]
        return load_config(path, [*settings, *overrides])

    config = load(DROP_RUN_DATA)
    if config.data.path == load_config(path).data.path:
        return config
    return load(DROP_RUN_DATA | {"data.roles": "null", "data.fingerprint": "null"})


def check_data(data: Data, overrides: Sequence[str]) -> None:
    """Refuses a data set that is missing, or remote and named only by the run.

    A run's configuration need not be trusted: it starts no build and no download.
    """
    remote = [path for path in data.paths if is_remote(path)]
    if remote and not any(override.startswith("data.path=") for override in overrides):
        raise RetrievalError(
            f"the run names the data set {remote[0]}, which is fetched only when you give it; "
            f"expected data.path={remote[0]} on the command line"
        )
    own_options = any(override.startswith("data.storage_options") for override in overrides)
    refuse_options(data, own_options)
    if data.build is not None and "://" not in data.path and not Path(data.path).exists():
        options = [f"--{key}={value}" for key, value in data.build.items() if key != "source"]
        command = ["heron", "shards", "build", str(data.build.get("source")), "--out", data.path]
        raise RetrievalError(
            f"{data.path} is not there; expected the data set of the run, or another by data.path; "
            f"if you trust the run, build it with: {shlex.join(command + options)}"
        )


def _rows(reader: Reader, config: Config, choice: Choice) -> Rows:
    if choice.role is not None:
        if choice.role not in ROLES:
            raise RetrievalError(f"unknown role '{choice.role}'; expected {', '.join(ROLES)}")
        roles = _roles(reader, config.data, choice.split or config.data.split)
        rows = roles.rows_of(choice.role)
    elif choice.split is not None:
        rows = reader.split_rows(choice.split)
    else:
        rows = np.arange(reader.starts[-1])
    if not len(rows):
        chosen = {"role": choice.role, "split": choice.split}
        names = ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None)
        raise RetrievalError(
            f"{config.data.path} has no row{f' of {names}' if names else ''}; expected some; give "
            "another --role or --split; `heron shards show` counts the rows of each split"
        )
    return np.sort(rows).astype(np.int64)


def _roles(reader: Reader, data: Data, split: str) -> Roles:
    """Returns the roles of a split's rows, without the partial rows that training drops."""
    roles = assign(reader, split, data.protocol)
    if data.protocol.partial_rows == "keep":
        return roles
    if data.protocol.hide_labels:  # such rows count as partial; samples keep all of their labels
        reader = open_reader(data)
        hide_labels(reader, roles.labelled, data.protocol)
    seen = list(dict.fromkeys(view.stored for view in data.views))
    return drop_partial(reader, roles, seen, data.protocol)


def _layers(model: EmbeddingModel, choice: Choice) -> dict[Layer, LayerRecord]:
    if choice.dtype not in ("float32", "float16"):
        raise RetrievalError(f"unknown dtype '{choice.dtype}'; expected float32 or float16")
    widths = model.widths
    for name in choice.layers or ():
        if name not in widths:
            raise RetrievalError(
                f"the model has no layer '{name}'; found {', '.join(widths)}; expected one of them"
            )
    return {
        name: LayerRecord(dim=widths[name], dtype=choice.dtype, views=model.model.classified)
        for name in LAYERS
        if name in (choice.layers or widths)
    }


def _start_folder(embedder: Embedder, plan: dict[str, Any], overwrite: bool) -> None:
    """Makes the folder and saves the plan in it, or resumes a folder with the same plan.

    Raises a RetrievalError if the folder holds something else, or two rows have the same key.
    """
    out = embedder.out
    read_samples(embedder.reader, embedder.rows).refuse_duplicates()
    if overwrite:
        make_room(out, overwrite, RetrievalError)
    out.mkdir(parents=True, exist_ok=True)
    path = out / PLAN
    if path.exists():
        try:
            if not isinstance(saved_plan := parse_json(path.read_bytes()), dict):
                raise ValueError(f"found {short_repr(saved_plan)}")
        except ValueError as error:
            raise RetrievalError(
                f"{path} is no plan: {error}; expected the plan of an unfinished embedding; choose "
                f"another --out, or add --overwrite, which moves {out} to {aside_name(out)}"
            ) from None
        if differ := differences(plan, saved_plan):
            raise RetrievalError(
                f"{out} holds embeddings of another kind: {'; '.join(differ)}; expected the same, "
                f"to go on with; choose another --out, or add --overwrite, which moves it to "
                f"{aside_name(out)}"
            )
        return
    refuse_taken(out, overwrite, RetrievalError)
    save_json(path, plan)


def _finish(
    embedder: Embedder,
    plan: dict[str, Any],
    run: str,
    by_rank: Sequence[Mapping[int, PartManifest]],
) -> None:
    """Writes the samples and then, last, the manifest; `by_rank` holds each process's parts."""
    part_manifests = {number: part for parts in by_rank for number, part in parts.items()}
    lost = {row: why for part in part_manifests.values() for row, why in part.lost.items()}
    rows = embedder.rows[~np.isin(embedder.rows, np.array(list(lost), np.int64))]
    EmbeddingsManifest(
        format=FORMAT,
        run=run,
        checkpoint=plan["checkpoint"],
        data=embedder.config.data.path,
        data_fingerprint=plan["data_fingerprint"],
        precision=plan["precision"],
        rows=len(rows),
        layers=embedder.layers,
        parts=[part_manifests[number].part for number in range(len(part_manifests))],
        samples=read_samples(embedder.reader, rows).save(embedder.out),
        lost=lost,
    ).write(embedder.out / MANIFEST)


def read_samples(reader: Reader, rows: Rows) -> Samples:
    """Returns keys and labels of some rows of a data set."""
    labels = reader.manifest.labels
    known = reader.is_labelled(rows)
    if labels.kind == "complementary":  # the class is known if all others are ruled out
        known &= reader.targets(rows).sum(1) == len(labels.names) - 1
    if reader.may_lack_labels:  # a row counts as labelled only if all its labels are known
        known &= (reader.labels(rows) != labels.unlabelled_value).all(1)
    targets = np.zeros((len(rows), len(labels.names)), np.uint8)
    if known.any():
        targets[known] = reader.ground_truth(rows[known])
    keys = np.array([key.encode() for key in reader.sample_keys(rows)], np.bytes_)
    return Samples(keys, rows, targets, known, labels.names, labels.kind)
