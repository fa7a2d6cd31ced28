"""A portable folder of a trained model, and its way to and from Hugging Face's hub."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from jinja2 import Environment
from pydantic import Field

from heron.base.artefact import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Artefact,
    FileName,
    FileSum,
    Fingerprint,
    parse_json,
    sha256,
)
from heron.base.atomic import named, new_folder
from heron.base.errors import CheckpointError
from heron.base.extras import in_a_line, require
from heron.data.options import Cache
from heron.distributed.agreement import versions
from heron.experiment.config import Config, RunFolder, dump_config
from heron.models.heterogeneous import Heterogeneous
from heron.models.networks import with_pretrained_configs, without_weights
from heron.training.checkpoint import STATE, CheckpointManifest, save_tensors
from heron.training.signature import SIGNATURE, Signature
from heron.training.tracking import scores_of

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.yaml", "README.md"
TEMPLATE = Path(__file__).parent / "card.jinja"
READ = WEIGHTS, CONFIG, SIGNATURE  # files that are checked; the card may be edited
SCHEME = "hf://"
NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
REPOSITORY = re.compile(rf"({NAME}/{NAME})(?:@({NAME}(?:/{NAME})*))?")


def as_saved(config: Config) -> Config:
    """Returns an experiment as its run saves it: to be built without the weights it begins with."""
    return config.model_copy(update={"model": with_pretrained_configs(config.model)})


class SavedModel(Artefact):
    """The manifest of a saved model: its files, and what is known of its training.

    Attributes:
        files: size and sha256 of the files that are read.
        data: the fingerprint of the data set that it was trained on, if known.
        scores: of the run, if these are its last weights.
        made_with: the versions with which it was trained, or else saved.
    """

    description: ClassVar[str] = "the manifest of a saved model"
    error: ClassVar[type[CheckpointError]] = CheckpointError
    remedy: ClassVar[str] = "download it again, or save it again with heron save or save_pretrained"
    versions: ClassVar[tuple[int, ...]] = (1,)

    format: Literal[1] = 1
    files: dict[FileName, FileSum]
    data: Fingerprint | Literal[""] = ""
    scores: dict[str, float] = {}
    made_with: dict[str, str] = Field(default={}, max_length=64)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads a folder's manifest and verifies its files; CheckpointError if any was altered."""
        manifest = cls.read(folder / MANIFEST)
        if sorted(manifest.files) != sorted(READ):
            raise CheckpointError(
                f"{folder / MANIFEST} must list {', '.join(sorted(READ))}, got "
                f"{', '.join(sorted(manifest.files)) or 'no file'}; {cls.remedy}"
            )
        for name in (CONFIG, SIGNATURE):
            if (size := manifest.files[name].bytes) > MAX_MANIFEST_BYTES:
                raise CheckpointError(
                    f"{folder / name} must have at most {MAX_MANIFEST_BYTES:,} bytes, got "
                    f"{size:,}; {cls.remedy}"
                )
        manifest.check_files(folder, manifest.files)
        return manifest


def save(
    folder: Path,
    network: Heterogeneous,
    config: Config,
    signature: Signature,
    origin: Path | None = None,
    where: str = "",
    overwrite: bool = False,
) -> SavedModel:
    """Writes a model's folder, atomically; what it holds is refused, or moved aside.

    `network` may be on any device. Paths of the author's machine in `config` are left out. `origin`
    is the checkpoint or saved model that the model was read from, None if unknown; its history is
    kept where the weights are still the same. `where` is the argument of `from_pretrained` in the
    card; "" is the folder's name.

    Raises CheckpointError if the folder is not empty, and DiskFull or OSError if it cannot be
    written.
    """
    with new_folder(folder, overwrite, CheckpointError) as partial:
        weights = {k: value.cpu().contiguous() for k, value in network.state_dict().items()}
        save_tensors(weights, partial / WEIGHTS)
        (partial / CONFIG).write_text(dump_config(portable(config)))
        (partial / SIGNATURE).write_text(signature.text())
        files = {name: FileSum.of(partial / name) for name in READ}
        history = _history(origin, files[WEIGHTS].sha256)
        manifest = SavedModel(files=files, **history).write(partial / MANIFEST)
        where = where or named(folder).name
        card = model_card(manifest, where, network.classified_width, config, signature)
        (partial / CARD).write_text(card)
    return manifest


def model_card(
    manifest: SavedModel, where: str, width: int, config: Config, signature: Signature
) -> str:
    """Returns a model card for Hugging Face's hub: use, inputs, scores, training.

    `where` is the argument of `from_pretrained` in the example; `width` is that of `encode`'s
    vectors.
    """
    terms = [name.rpartition(".")[2] for name in config.objective.terms()]
    tags = ["heron", "contrastive-learning", "multi-view", *terms]
    header = {"library_name": "heron", "tags": list(dict.fromkeys(tags))}
    inputs = {stored.view.name: stored for stored in signature.inputs}
    template = Environment(trim_blocks=True, keep_trailing_newline=True)
    template.filters["json"] = json.dumps
    return template.from_string(TEMPLATE.read_text()).render(
        vars(manifest),
        header=yaml.safe_dump(header, sort_keys=False).strip(),
        where=where,
        terms=terms,
        inputs=inputs,
        arguments=", ".join(f'"{name}": {name}' for name in inputs if name.isidentifier()),
        width=width,
        signature=signature,
        versions=[
            f"{name} {value}" for name, value in manifest.made_with.items() if name != "code"
        ],
    )


def _history(origin: Path | None, weights: str) -> dict[str, Any]:
    """Returns what `origin` knows of weights with this sha256: data, scores and versions."""
    if origin is None or not (origin / WEIGHTS).exists() or sha256(origin / WEIGHTS) != weights:
        return {"made_with": versions()}
    if (origin / STATE).exists():
        state = CheckpointManifest.read(origin / STATE)
        scores = _scores(origin.parent.parent / "result.json", state.position.step)
        return {"data": state.data, "scores": scores, "made_with": state.made_with or versions()}
    if (origin / MANIFEST).exists():
        saved = SavedModel.open(origin)
        return {"data": saved.data, "scores": saved.scores, "made_with": saved.made_with}
    return {"made_with": versions()}


def _scores(result: Path, step: int) -> dict[str, float]:
    """Returns the scores of a run's last weights, if `step` is its last."""
    try:
        content = parse_json(result.read_bytes())
        if content["steps"] != step:
            return {}
        scores = scores_of(content)
    except (OSError, ValueError, KeyError, TypeError):  # the run has not ended
        return {}
    return {name: float(v) for name, v in scores.items() if type(v) in (int, float)}


def portable(config: Config) -> Config:
    """Returns an experiment without paths and addresses of the machine that it ran on.

    Of the data set's path only the last part is left: to train again, set `data.path`.
    """
    name = Path(config.data.path).name or "data"
    changes: dict[str, Any] = {"build": None, "cache": Cache(), "storage_options": {}}
    if config.data.sources is None:  # the same data set, at another place
        changes["fingerprint"] = config.data.fingerprint
    views = [
        view.model_copy(update={"tokenizer": Path(view.tokenizer).name})
        for view in config.data.views
    ]
    return config.model_copy(
        update={
            "run": RunFolder(dir="run"),
            "data": config.data.for_data_set(name).model_copy(update=changes | {"views": views}),
            "model": without_weights(config.model),
            "tracking": [],
        }
    )


def parse_address(text: str) -> tuple[str, str | None]:
    """Splits `org/name@revision`, with or without `hf://`; CheckpointError for other names."""
    match = REPOSITORY.fullmatch(text.removeprefix(SCHEME))
    if match is None:
        raise CheckpointError(
            f"'{text}' does not name a model on the Hub; use {SCHEME}org/name or "
            f"{SCHEME}org/name@revision, with a branch, a tag or a commit"
        )
    return match[1], match[2]


def fetch(address: str) -> Path:
    """Downloads a model's files, and no others, into the hub's cache, and returns its folder.

    Raises CheckpointError if it cannot be fetched or was not saved by Heron, and MissingPackage
    without `huggingface_hub`.
    """
    hub, (name, revision) = require("huggingface_hub", address), parse_address(address)
    try:
        folder = Path(
            hub.snapshot_download(name, revision=revision, allow_patterns=[MANIFEST, *READ])
        )
    except Exception as error:  # of the hub, the network or the disk
        raise CheckpointError(
            f"cannot download {address}: {in_a_line(error)}; it must be public, or your token "
            "(HF_TOKEN) must have read access; check the name, the revision and the network"
        ) from error
    if not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{address} has no {MANIFEST}, so it is not a model that Heron saved; publish one with "
            "heron save RUN --push ORG/NAME"
        )
    return folder


def publish(folder: Path, repository: str, private: bool | None = None) -> None:
    """Uploads a saved model's folder in one commit; an existing card is kept.

    Raises CheckpointError if the hub refuses it or its name, MissingPackage without
    `huggingface_hub`.
    """
    name, revision = parse_address(repository)
    api = require("huggingface_hub", f"{SCHEME}{name}").HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        keep = [CARD] if api.file_exists(name, CARD, revision=revision) else None
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            revision=revision,
            ignore_patterns=keep,
            commit_message="Upload a Heron model",
        )
    except Exception as error:  # of the hub or the network
        raise CheckpointError(
            f"cannot write to {SCHEME}{name}: {in_a_line(error)}; your token (HF_TOKEN) must "
            "have write access; check the name, the token and the network"
        ) from error
