"""`heron init`: a first experiment for a data set, chosen by its manifest."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from heron.cli.arguments import Location
from heron.cli.facts import Facts, read_facts
from heron.config.errors import ConfigError
from heron.config.model import Tuning
from heron.config.overrides import as_typed
from heron.shards.artefact import Count
from heron.shards.atomic import make_parents, new_file
from heron.shards.manifest import View

if TYPE_CHECKING:
    from heron.training.backbone import Backbone

STEPS = 1500  # of a first run, about
MIN_EPOCHS, MAX_EPOCHS = 5, 200
MAX_BATCH = 256
MAX_SIDE = 96  # larger pictures are resized to this
TOKENS = 128  # of a text
FROZEN_VIEWS = 4  # augmented views of a row that a frozen backbone embeds once
KINDS = {"vector": "table", "text": "text", "graph": "graph"}  # of a single view, in words
FEW = {"labelled": 64, "unlabelled": 192}  # rows of a batch, where most rows have no label
Line = tuple[str, Any, str]  # an indented key, its value, and the reason


def batch_of(rows: int) -> int:
    """Returns the size of a batch: about an eighth of the rows, as a power of two."""
    return min(rows, max(16, min(MAX_BATCH, 1 << int(math.log2(max(rows / 8, 1))))))


def _batch(facts: Facts) -> dict[str, int]:
    """Returns the rows of a batch: mostly rows without a label, where these are most."""
    labelled, other = facts.labelled, facts.unlabelled
    batch = {"labelled": batch_of(labelled) if labelled else 0, "unlabelled": 0}
    if facts.kind == "none":
        batch["unlabelled"] = batch_of(other)
    elif facts.kind in ("multi_class", "multi_label") and not facts.plain and other > 1:
        batch["unlabelled"] = batch_of(other)
        if other > labelled:
            batch = {"labelled": min(labelled, FEW["labelled"])}
            batch["unlabelled"] = min(other, FEW["unlabelled"])
    return batch


def _data(path: str, facts: Facts) -> tuple[list[Line], int]:
    """Returns the lines of the data section, and the number of steps of an epoch."""
    labelled, other_rows = facts.labelled, facts.unlabelled
    protocol: dict[str, Any] = {"labelled": "all", "test": facts.test or "unlabelled"}
    why = f"all labels are used, and the test split is scored; {facts.why_labels}"
    used = labelled + facts.validation
    if facts.kind == "none":
        protocol, why = {"test": "unlabelled"}, "no row has a label: nothing is scored"
    elif facts.why_labels.startswith("--labelled") or (facts.test is None and facts.scorable):
        why = facts.why_labels
        protocol = {"labelled": used, "stratified": True, "test": facts.test or "unlabelled"}
    elif facts.test is None:
        why = "labels that leave several classes give no scores"
    if facts.validation:
        protocol["validation"] = facts.validation / used
    batch = _batch(facts)
    sizes = f"of {labelled:,} labelled and {other_rows:,} other rows"
    if other_rows and not batch["unlabelled"]:
        sizes += ", which training does not use"
    epoch = "labelled" if batch["unlabelled"] == 0 or labelled > other_rows else "unlabelled"
    lines: list[Line] = [
        ("data", None, f"{facts.manifest.dataset}, {facts.manifest.labels.kind} labels"),
        ("  path", path, ""),
        ("  split", facts.split, "rows that are trained on"),
        ("  protocol", protocol, why),
        ("  batch", batch, f"{sizes}, over all processes"),
        ("  epoch", epoch, "a pass over the larger of the streams"),
        ("  views", None, _why_views(facts)),
    ]
    for view in facts.looks:
        lines.append(("    -", {"stored": view.name} | _view_options(facts, view), ""))
    vectors = [view for view in facts.views if view.kind == "vector"]
    if vectors and all(view.mean for view in vectors):
        lines.append(("  standardise", True, "columns may have different units"))
    if any(-1 in view.shape for view in facts.views if view.kind == "image"):
        lines.append(("  decode_size", MAX_SIDE * 4 // 3, "the pictures have several sizes"))
    rows = labelled if epoch == "labelled" else other_rows
    return lines, max(1, rows // max(1, batch[epoch]))


def _why_views(facts: Facts) -> str:
    left_out = [view.name for view in facts.manifest.views if view not in facts.views]
    why = "one pair per sample"
    if facts.single_view:
        why = "one view, seen twice: augmentation makes the pair"
    if facts.plain:
        why = "one view, seen once"
    return f"{why}; left out: {', '.join(left_out)}" if left_out else why


def _view_options(facts: Facts, view: View) -> dict[str, Any]:
    if view.kind == "text":
        tokenizer = facts.backbone.tokenizer if facts.backbone else None
        return {"tokens": TOKENS} | ({"tokenizer": tokenizer} if tokenizer else {})
    if view.kind == "graph":
        return {"augment": ["drop_nodes"]}
    if view.kind != "image":
        return {"augment": [{"noise": {"std": 0.1}}]} if len(facts.looks) > len(facts.views) else {}
    crop: dict[str, Any] = {
        "crop": {"area": [0.4, 1.0] if facts.single_view else [0.8, 1.0], "flip": 0.0}
    }
    colour = [{"color": {"strength": 0.2, "hue": 0.05, "grey": 0.0}}]
    steps = [crop, *(colour if facts.single_view and view.shape[-1] == 3 else [])]
    size: dict[str, Any] = (
        {"size": MAX_SIDE} if -1 in view.shape or max(view.shape[:2]) > MAX_SIDE else {}
    )
    if facts.backbone and facts.backbone.kind == "image" and facts.backbone.side:
        size = {"size": facts.backbone.side}
    return size | {"augment": steps}


def _encoder(views: Sequence[View], backbone: "Backbone | None") -> tuple[dict[str, Any], int, str]:
    """Returns the encoder of views of one kind, the width of projections, and why."""
    if backbone and backbone.kind == views[0].kind:
        return backbone.encoder, 128, f"pretrained: {backbone.why}"
    if views[0].kind == "text":
        bert: dict[str, Any] = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2}
        bert |= {"num_attention_heads": 4, "intermediate_size": 128}
        bert |= {"max_position_embeddings": TOKENS}
        why = "a small one from scratch; weights: FOLDER starts from a pretrained one"
        return {"kind": "transformers", "config": bert}, 64, why
    if views[0].kind == "graph":
        return {"kind": "gin", "width": 32, "layers": 3}, 96, "as in published results"
    if views[0].kind == "image":
        side = max(MAX_SIDE if -1 in v.shape else min(MAX_SIDE, *v.shape[:2]) for v in views)
        stages = max(1, min(4, round(math.log2(max(side, 16) / 8))))
        channels = [16 * 2**n for n in range(stages)]
        encoder: dict[str, Any] = {"kind": "convnet", "channels": channels}
        encoder |= {"widths": [200], "dropout": 0.1}
        return encoder, 128, f"{side} pixels, halved {stages} times"
    widest = max(view.shape[0] for view in views)
    hidden = 1 << min(9, max(5, round(math.log2(widest))))
    encoder = {"kind": "mlp", "widths": [hidden, hidden], "dropout": 0.2}
    return encoder, min(128, hidden), f"the widest view has {widest} columns"


def _model(facts: Facts) -> list[Line]:
    lines: list[Line] = [("model", None, "")]
    if facts.mixed:
        lines.append(("  encoders", None, "one for each kind of view"))
        encoders = [(view.name, *_encoder([view], facts.backbone)) for view in facts.views]
        lines += [(f"    {as_typed(name)}", encoder, why) for name, encoder, _, why in encoders]
        width = min(width for _, _, width, _ in encoders)
    else:
        encoder, width, why = _encoder(facts.views, facts.backbone)
        lines.append(("  encoder", encoder, why))
    lines.append(("  projection_width", width, "dimension that the loss compares"))
    if len(facts.looks) > len(facts.views):
        lines += [
            ("  shared_encoder", True, "both views are of one kind"),
            ("  shared_projector", True, ""),
            ("  classify_on", "first_view", "the second view is only for training"),
        ]
    return lines


def _objective(facts: Facts, name: str) -> list[Line]:
    terms: dict[str, dict[str, Any]]
    single = facts.kind == "multi_class"
    classifier = {"cross_entropy" if single else "bce": {"weight": 1.0}}
    if facts.plain:
        why = (
            f"one {KINDS[facts.views[0].kind]}: a second view of it would add nothing, so training "
            "uses only labels. A forest or logistic regression is often better here; try "
            f"heron compare --quick {name}.yaml"
        )
        terms = classifier
    elif single and all(view.kind == "image" for view in facts.views):
        why = (
            "a classifier, SupCon on rows with a label, SimCLR's loss on all rows. With aligned "
            "pictures, such as portraits, and few labels, logistic regression may be better; try "
            f"heron compare --quick {name}.yaml"
        )
        terms = classifier | {
            "supcon": {"weight": 0.5, "tau": 0.1},
            "nt_xent": {"weight": 0.5, "tau": 0.5},
        }
    elif facts.kind in ("multi_class", "multi_label"):
        why = "HeroCon: a classifier, pairs of views, and pairs weighted by their labels"
        terms = classifier | {
            "weighted_unsupervised": {"weight": 0.1, "tau": 0.1},
            "weighted_supervised": {"weight": 0.02, "tau": 1.0}
            | ({"distance": "indicator"} if single else {}),
        }
    elif facts.kind == "hierarchical":
        why = "HiMulCon: pairs weighted by the levels that they share; then a linear probe"
        terms = {"hierarchical": {"tau": 0.1, "constrain": False, "penalty": "exp_inverse"}}
    elif facts.kind == "complementary":
        why = "MulCo: labels name classes that a row is not in"
        queue = max(1024, batch_of(facts.labelled))
        terms = {"ub_log": {"weight": 1.0}}
        terms["mulco"] = {"weight": 1.0, "tau": 0.05, "kind": "soft", "queue": queue}
    elif facts.mixed:
        why, terms = "CLIP's loss: no row has a label, and views are matched", {"clip": {}}
    else:
        why, terms = "SimCLR's loss: no row has a label", {"nt_xent": {"tau": 0.5}}
    return [
        ("objective", None, why),
        *((f"  {name}", options, "") for name, options in terms.items()),
    ]


def experiment(path: str, facts: Facts, name: str) -> str:
    """Returns a commented experiment, as YAML."""
    data, per_epoch = _data(path, facts)
    steps = max(MIN_EPOCHS, min(MAX_EPOCHS, round(STEPS / per_epoch))) * per_epoch
    train = {"total_steps": steps, "evaluate_every_steps": max(1, steps // 4)}
    lr, why = 0.002, "a learning rate for small networks"
    if facts.backbone:
        if facts.backbone.encoder.get("freeze"):
            train["frozen_views"] = FROZEN_VIEWS
        lr, why = facts.backbone.lr, f"a learning rate for a backbone: {facts.backbone.why}"
    optim = {"kind": "adamw", "lr": lr, "weight_decay": 0.05, "schedule": "cosine"}
    lines: Sequence[Line] = [
        ("seed", 0, "sets initial weights, batches and augmentations"),
        ("run", {"dir": f"runs/{name}"}, "checkpoints, scores and the report"),
        *data,
        *_model(facts),
        *_objective(facts, name),
        ("optim", optim | {"warmup_epochs": 1}, why),
        ("train", train, f"{steps / per_epoch:g} epochs of these rows; more rows, fewer epochs"),
    ]
    return "".join(map(_format_line, lines))


def _format_line(line: Line) -> str:
    key, value, why = line
    head = key if key.endswith("-") else f"{key}:"
    text = f"{head} {'' if value is None else as_typed(value)}".rstrip()
    why = why if why.isprintable() else ascii(why)  # a line break in it would begin a key
    return f"{text}  # {why}\n" if why else f"{text}\n"


def init(
    data: Annotated[Location, "folder of shards, or a URL of one"],
    *,
    labelled: Annotated[
        Count | None, "rows whose label is used; the others count as unlabelled (default: all)"
    ] = None,
    validation: Annotated[Count, "how many of these to hold out for model selection"] = 0,
    backbone: Annotated[
        Location | None,
        "pretrained encoder: a folder with config.json and safetensors files, hf://ORG/NAME, or "
        "timm:NAME=FILE.safetensors",
    ] = None,
    tune: Annotated[Tuning, "how to train the backbone"] = "frozen",
    out: Annotated[Path, "file to write"] = Path("experiment.yaml"),
) -> None:
    """Writes a first experiment for a data set, with a comment on why each value was chosen.

    heron init data/mine
    heron init data/mine --labelled 200 --validation 50 --out mine.yaml
    heron init data/mine --backbone weights/vit --tune lora
    """
    from heron.config.experiment import parse_config
    from heron.config.sections import parse_yaml

    if out.exists():
        raise ConfigError(f"{out} already exists; name a new file with --out")
    facts = read_facts(data, labelled, validation)
    if backbone is not None:
        from heron.training.backbone import read_backbone

        network, kinds = read_backbone(backbone, tune), sorted({view.kind for view in facts.views})
        if network.kind not in kinds:
            raise ConfigError(
                f"--backbone {backbone} is a network for views of kind {network.kind}, but this "
                f"data set has views of kind {', '.join(kinds)}; remove --backbone"
            )
        facts = replace(facts, backbone=network)
    text = experiment(data, facts, out.stem)
    config = parse_config(parse_yaml(text, str(out)))
    make_parents(out, ConfigError)
    with new_file(out, False, ConfigError) as stream:
        stream.write(f"# heron pretrain {out}\n{text}".encode())
    terms = " + ".join(config.objective.terms())
    print(f"{out}: {facts.kind} labels, {len(config.data.views)} views, {terms}")
    if facts.plain:
        print(
            f"with one {KINDS[facts.views[0].kind]}, a forest may do better; to find out in five "
            f"minutes, run heron compare --quick {out}"
        )
