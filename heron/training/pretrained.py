"""Loads trained models from the folders of runs and checkpoints."""

from pathlib import Path

from safetensors.torch import load_file

from heron.base.artefact import MANIFEST, sha256
from heron.base.errors import CheckpointError, ConfigError
from heron.base.extras import offline
from heron.experiment.config import load_saved
from heron.losses.objective import build_losses
from heron.models.heterogeneous import Heterogeneous
from heron.models.networks import of_folder
from heron.training.checkpoint import (
    STATE,
    UNREADABLE,
    CheckpointManifest,
    complete_checkpoints,
    find_damage,
)
from heron.training.saved import SavedModel
from heron.training.signature import Signature


def locate(path: str | Path) -> Path:
    """Returns the folder of a model or a run's newest checkpoint; CheckpointError if unusable."""
    folder = Path(path)
    if not (folder / "model.safetensors").exists():
        checkpoints = complete_checkpoints(folder / "checkpoints")
        if not checkpoints:
            raise CheckpointError(
                f"{path} has no complete checkpoint; pass the folder of a run, or of one of its "
                "checkpoints, such as runs/faces/checkpoints/step-00000200"
            )
        folder = checkpoints[-1]
    if (folder / MANIFEST).exists():
        SavedModel.open(folder)
    elif (folder / STATE).exists() and (fault := find_damage(folder)):  # bare weights have neither
        raise CheckpointError(f"{folder} is damaged ({fault}); restore it, or pass another")
    return folder


def weights_sha256(checkpoint: Path) -> str:
    """Returns the sha256 of a checkpoint's weights, from its manifest where it has one."""
    if not (checkpoint / STATE).exists():
        return sha256(checkpoint / "model.safetensors")
    manifest = CheckpointManifest.read(checkpoint / STATE)
    return manifest.files["model.safetensors"].sha256


def from_pretrained(path: str | Path, trust_code: bool = False) -> Heterogeneous:
    """Returns the model of a checkpoint, or of a run's newest one, on the CPU, in evaluation mode.

    It may have been trained under any strategy, and by anyone: see `load_saved` for `trust_code`,
    and `networks.of_folder` for what is built.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = locate(path)
    signature = Signature.read(path)
    try:
        config = load_saved(path, trust_code=trust_code)
        with offline():
            model = Heterogeneous(
                of_folder(config.model, trust_code),
                signature.shapes,
                signature.labels,
                build_losses(config.objective),
                config.data.view_names,
            )
        model.precision = config.train.precision
        if model.precision == "fp64":
            model.double()
        model.load_state_dict(load_file(path / "model.safetensors"))
    except (*UNREADABLE, ConfigError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    return model.eval()
