"""Downloads models from Hugging Face's hub, and publishes them."""

import re
from pathlib import Path

from heron.base.artefact import MANIFEST
from heron.base.errors import CheckpointError
from heron.base.extras import in_a_line, require
from heron.training.saved import CARD, READ

SCHEME = "hf://"
NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
REPOSITORY = re.compile(rf"({NAME}/{NAME})(?:@({NAME}(?:/{NAME})*))?")


def parse(text: str) -> tuple[str, str | None]:
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
    hub, (name, revision) = require("huggingface_hub", address), parse(address)
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
    name, revision = parse(repository)
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
