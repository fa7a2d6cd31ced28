"""README.md of a saved model: a model card, as Hugging Face's hub shows it."""

import json
from collections.abc import Mapping
from typing import NamedTuple

import yaml

from heron.pipeline.config.experiment import Config
from heron.pipeline.training.signature import Signature

CARD = "README.md"
LICENCE = "# license: apache-2.0  # yours to choose: https://hf.co/docs/hub/repositories-licenses"


class Facts(NamedTuple):
    """What a card says of a model's past.

    Attributes:
        width: of the vectors that `encode` returns.
        where: the argument of `from_pretrained` that a reader is told.
        data: fingerprint of the data set that it was trained on, or "".
        scores: of the run, by name.
        made_with: versions, by name.
    """

    width: int
    where: str
    data: str
    scores: Mapping[str, float]
    made_with: Mapping[str, str]


def model_card(facts: Facts, config: Config, signature: Signature) -> str:
    """Returns the card of a model: header, use, inputs, scores, and how it was trained."""
    terms = [name.rpartition(".")[2] for name in config.objective.terms()]
    tags = ["heron", "contrastive-learning", "multi-view", *terms]
    header = {"library_name": "heron", "tags": list(dict.fromkeys(tags))}
    inputs = {one.view.name: one for one in signature.inputs}
    rows = [
        f"| `{name}` | {'uint8 pictures' if one.decoded else 'vectors'} | {one.view.extent} |"
        for name, one in inputs.items()
    ]
    given = ", ".join(f'"{name}": {name}' for name in inputs if name.isidentifier()) or "..."
    heron = facts.made_with.get("heron", "")
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False).strip(),
        LICENCE,
        "---",
        f"# {facts.where.removeprefix('hf://')}",
        "",
        f"A model of [Heron](https://pypi.org/project/heron-pretrain/) {heron}: one vector for a "
        f"sample of {len(inputs)} views. Terms of its objective: {', '.join(terms)}.",
        "",
        "## Use",
        "```python",
        "import heron",
        f"model = heron.from_pretrained({json.dumps(facts.where)})",
        f"z = model.encode({{{given}}})  # float32 [rows, {facts.width}]",
        "```",
        "| view | rows | shape |",
        "|---|---|---|",
        *rows,
        "",
        "Rows are given raw: the model standardises and scales them itself.",
    ]
    if names := signature.label_names:
        kind = signature.label_kind.replace("_", " ")
        lines += ["", f"## Labels ({kind})", "```json", json.dumps(names), "```"]
    if facts.scores:
        lines += ["", "## Scores on the test rows", "| score | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in facts.scores.items()]
    lines += ["", "## Training", "```sh", "heron pretrain config.yaml data.path=FOLDER", "```"]
    if facts.data:
        lines += [f"FOLDER holds the data set of the fingerprint `{facts.data}`."]
    versions = [f"{name} {value}" for name, value in facts.made_with.items() if name != "code"]
    lines += ["", f"Versions: {', '.join(versions)}."]
    return "\n".join(lines) + "\n"
