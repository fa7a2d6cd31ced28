"""A trained model's predictions for rows of a data set, as its evaluation makes them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from heron.config.errors import InputError
from heron.data.dataset import load_or_assign_roles
from heron.evaluation.evaluator import Evaluator, Predictions
from heron.retrieval.embed import check_data, load_for_data
from heron.retrieval.embeddings import Role
from heron.retrieval.layers import EmbeddingModel
from heron.training.launch import start_processes
from heron.training.pretrained import locate


def predict_rows(
    run: str | Path,  # folder of a run or a checkpoint; need not be trusted: see `embed.embed`
    overrides: Sequence[str] = (),  # of its configuration
    data: str | None = None,  # folder of shards, or a URL; None: the run's data set
    split: str | None = None,  # rows of one split; None: of all
    role: Role | None = None,  # rows of one role by the run's protocol, in its split; None: all
) -> tuple[list[str], Predictions, list[str]]:
    """Predicts rows with a run's newest checkpoint, or with a checkpoint; see `heron predict`.

    Returns keys of the rows, their predictions, and the names of the labels. Raises the errors of
    `embed.embed`, and an InputError if there is no classifier, and the data set is not the run's
    own, on which a probe could be trained.
    """
    checkpoint = locate(run)
    overrides = [*overrides, *([] if data is None else [f"data.path={data}"])]
    other_data = any(override.startswith("data.path=") for override in overrides)
    config = load_for_data(checkpoint / "config.yaml", overrides)
    check_data(config.data, overrides)
    device = start_processes(config).device
    opened = EmbeddingModel.open(checkpoint, config, device)
    reader, model = opened.reader, opened.model
    if model.classifier is None and other_data:
        raise InputError(
            f"the model of {checkpoint} has no classifier, and a probe is trained on the run's own "
            "data set; expected rows of that, or a run with a term such as cross_entropy"
        )
    if role is not None:
        roles = load_or_assign_roles(reader, config.data, split)
        rows = getattr(roles, role)
    else:
        rows = np.arange(reader.starts[-1]) if split is None else reader.split_rows(split)
    labelled = np.empty(0, np.int64)
    if model.classifier is None:
        labelled = load_or_assign_roles(reader, config.data).labelled
    options = config.evaluate.model_copy(update={"knn": None, "cross_view": False, "probe": "auto"})
    predictions = Evaluator(reader, opened.views, options).predictors(model, labelled, rows)[0][""]
    return reader.sample_keys(predictions.rows), predictions, reader.manifest.labels.names
