"""A trained model out of a run's folder, on its own: weights, and what they are the weights of."""

from pathlib import Path

from safetensors.torch import load_file

from heron.pipeline.config.errors import CheckpointError, ConfigError
from heron.pipeline.config.experiment import load_run_config
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.models.networks import without_weights
from heron.pipeline.training.checkpoint import (
    STATE,
    UNREADABLE,
    CheckpointManifest,
    complete,
    damage,
)
from heron.pipeline.training.saved import SavedModel
from heron.pipeline.training.signature import Signature
from heron.shards.artefact import MANIFEST, sha256


def locate(path: str | Path) -> Path:
    """Returns the folder of a model: the path itself, or the newest checkpoint of a run.

    Raises:
        CheckpointError: there is none, or it was altered.
    """
    found = Path(path)
    if not (found / "model.safetensors").exists():
        checkpoints = complete(found / "checkpoints")
        if not checkpoints:
            raise CheckpointError(
                f"{path} has no complete checkpoint; expected the folder of a run, or of one of "
                "its checkpoints, such as runs/faces/checkpoints/step-00000200"
            )
        found = checkpoints[-1]
    if (found / MANIFEST).exists():
        SavedModel.open(found)
    elif (found / STATE).exists() and (fault := damage(found)):  # weights alone have neither
        raise CheckpointError(f"{found} is damaged ({fault}); bring it back, or give another")
    return found


def weights_sha256(checkpoint: Path) -> str:
    """Returns the sha256 of a checkpoint's weights: as its manifest has it, where it has one."""
    if not (checkpoint / STATE).exists():
        return sha256(checkpoint / "model.safetensors")
    manifest = CheckpointManifest.read(checkpoint / STATE)
    return manifest.sums(checkpoint)["model.safetensors"].sha256


def from_pretrained(path: str | Path) -> Heterogeneous:
    """Returns the model of a run's newest checkpoint, or of a checkpoint, on the CPU, to evaluate.

    Under which strategy it was trained makes no difference.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = locate(path)
    known = Signature.read(path)
    try:
        config = load_run_config(path / "config.yaml")
        terms, names = config.objective.terms(), config.data.view_names
        model = Heterogeneous(
            without_weights(config.model), known.shapes, known.labels, terms, names
        )
        model.precision = config.train.precision
        if model.precision == "fp64":
            model.double()
        model.load_state_dict(load_file(path / "model.safetensors"))
    except (*UNREADABLE, ConfigError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return model.eval()
