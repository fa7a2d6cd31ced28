"""`heron init`: a first experiment for a data set, chosen by its manifest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from heron.base.artefact import Count
from heron.base.atomic import make_parents, new_file
from heron.base.errors import ConfigError
from heron.cli.arguments import Location
from heron.experiment.overrides import as_typed
from heron.models.options import Tuning
from heron.shards.manifest import Manifest, View, load_manifest
from heron.shards.store import is_remote, open_store

if TYPE_CHECKING:
    from heron.training.alignment import Alignment  # with torch, which takes a second
    from heron.training.backbone import Backbone

TEST_EVERY = 5  # without a test split, one labelled row in so many is kept for the test
STEPS = 1500  # of a first run, about
MIN_EPOCHS, MAX_EPOCHS = 5, 200
MAX_BATCH = 256
MAX_SIDE = 96  # larger pictures are resized to this
TOKENS = 128  # of a text
FROZEN_VIEWS = 4  # augmented views of a row that a frozen backbone embeds once
KINDS = {"vector": "table", "text": "text", "graph": "graph"}  # of a single view, in words
MOST_NUMBERS = 100_000_000  # of the rows that scikit-learn's baselines learn and predict
FEW = {"labelled": 64, "unlabelled": 192}  # rows of a batch, where most rows have no label
TEMPLATE = Path(__file__).parent / "experiment.jinja"


@dataclass(frozen=True)
class Facts:
    """The facts about a data set that the choices depend on."""

    manifest: Manifest
    views: list[View]  # that the model sees: all, or one with complementary labels
    split: str  # for training
    test: str | None  # split for the test, if there is one
    labelled: int  # rows with a label that are trained on
    unlabelled: int  # rows that are trained on without one
    validation: int  # rows with a label that are neither trained on nor tested
    why_labels: str  # where these numbers come from
    scorable: bool  # whether labels determine each row's class, so that the split can be tested
    backbone: "Backbone | None" = None  # pretrained, for the views of its kind
    alignment: "Alignment | None" = None  # of the pictures that are seen twice, where looked at

    @property
    def kind(self) -> str:
        """The kind of the labels, `none` if no training row has one."""
        return self.manifest.labels.kind if self.labelled else "none"

    @property
    def mixed(self) -> bool:
        """Whether views are of several kinds, which need one encoder each."""
        return len({view.kind for view in self.views}) > 1

    @property
    def single_view(self) -> bool:
        """Whether there is a single stored view, which is then seen twice."""
        return len(self.views) == 1

    @property
    def plain(self) -> bool:
        """Whether labels alone are learnt: a second look at one table, text or graph adds none."""
        labelled = self.kind in ("multi_class", "multi_label")
        return labelled and self.single_view and self.views[0].kind != "image"

    @property
    def looks(self) -> list[View]:
        """The stored views in the order of the model's."""
        return self.views * (2 if self.single_view and not self.plain else 1)


def read_facts(data: str, wanted: int | None = None, validation: int = 0) -> Facts:
    """Reads the manifest and the labels of a data set.

    Of its labelled rows, `wanted` are used (None: all), of which `validation` are set aside. Raises
    ConfigError if there are too few rows, or too few for these.
    """
    from heron.shards.show import read_index  # with Pillow

    store = open_store(data)
    manifest = load_manifest(store)
    splits = {split: manifest.rows(split) for split in manifest.splits}
    split = "train" if splits.get("train") else max(splits, key=lambda name: splits[name])
    test_names = (name for name in ("test", "val", "valid", "dev") if name != split)
    test = next((name for name in test_names if splits.get(name)), None)
    labelled, scorable, classes = 0, True, set[int]()
    for shard in manifest.splits[split]:
        labels = read_index(store, shard).labels
        label_rows = labels[manifest.labels.is_labelled(labels)]
        labelled += len(label_rows)
        if manifest.labels.kind == "multi_class":
            classes.update(label_rows.ravel().tolist())
        if manifest.labels.kind == "complementary":  # rows may leave several classes
            scorable &= bool((label_rows.sum(1) == len(manifest.labels.names) - 1).all())
    views = manifest.views
    if manifest.labels.kind == "complementary":
        views = views[:1]  # the momentum encoder of MulCo is shared by the views
    if splits[split] < 4:
        raise ConfigError(f"{data}: split '{split}' must have 4 or more rows, got {splits[split]}")
    min_labelled = 2 if test or not scorable else 3  # two in a batch, and one for a test
    if 0 < labelled < min_labelled:
        raise ConfigError(
            f"{data}: {labelled} of {splits[split]} rows of split '{split}' have a label, but "
            f"training and testing need {min_labelled} or more; label more rows, or none"
        )
    if not (scorable or test or labelled < splits[split]):
        raise ConfigError(
            f"{data}: every row has complementary labels, and some leave several classes, so none "
            "can be tested; add a split 'test' whose labels leave one class"
        )
    kept = 0 if test or not scorable else 1  # for the test
    used = _number_of_labels(data, labelled, kept, wanted, validation, max(2, len(classes)))
    why = f"of {labelled:,} rows with a label"
    if wanted is not None:
        why = f"--labelled {wanted}, {why}"
    elif kept and labelled:
        used -= max(1, labelled // TEST_EVERY)
        why = f"no test split: one labelled row in {TEST_EVERY} is held out for testing"
    if validation:
        why += f"; --validation {validation}: held out for model selection"
    rest = splits[split] - used
    facts = Facts(manifest, views, split, test, used - validation, rest, validation, why, scorable)
    return replace(facts, alignment=_alignment(data, facts))


def _alignment(data: str, facts: Facts) -> "Alignment | None":
    """Looks at pictures of a folder that are seen twice and have labels; not at those of a URL."""
    labelled = facts.kind in ("multi_class", "multi_label")
    if not (labelled and facts.single_view and facts.views[0].kind == "image") or is_remote(data):
        return None
    import yaml

    from heron.training.alignment import read_alignment

    return read_alignment(yaml.safe_load(experiment(data, facts, "look"))["data"])


def _number_of_labels(
    data: str, labelled: int, kept: int, wanted: int | None, validation: int, fewest: int
) -> int:
    """Returns the number of labelled rows to use; ConfigError for one that cannot be."""
    most, used = labelled - kept, labelled if wanted is None else wanted
    if (wanted is not None or validation) and not labelled:
        raise ConfigError(f"{data} has no labelled rows; remove --labelled and --validation")
    if wanted is not None and not fewest <= wanted <= most:
        raise ConfigError(
            f"--labelled must be {fewest} (a row of each class) to {most}, got {wanted}: "
            f"{labelled} rows of {data} have a label"
            f"{', and one must be left to test on' * kept}; change or remove it"
        )
    held_out = max(1, labelled // TEST_EVERY) if kept and wanted is None else 0
    spare = max(0, used - held_out - fewest)
    if validation > spare:
        raise ConfigError(
            f"--validation must be at most {spare}, got {validation}: {fewest} or more of {used} "
            "labelled rows must be left to train on; lower it, or use more labelled rows"
        )
    return used


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


def _protocol(facts: Facts) -> tuple[dict[str, Any], str]:
    """Returns which rows are labelled, tested and held out, and why."""
    protocol: dict[str, Any] = {"labelled": "all", "test": facts.test or "unlabelled"}
    why = f"all labels are used, and the test split is scored; {facts.why_labels}"
    used = facts.labelled + facts.validation
    if facts.kind == "none":
        protocol, why = {"test": "unlabelled"}, "no row has a label: nothing is scored"
    elif facts.why_labels.startswith("--labelled") or (facts.test is None and facts.scorable):
        why = facts.why_labels
        protocol = {"labelled": used, "stratified": True, "test": facts.test or "unlabelled"}
    elif facts.test is None:
        why = "labels that leave several classes give no scores"
    if facts.validation:
        protocol["validation"] = facts.validation / used
    return protocol, why


def _why_views(facts: Facts) -> str:
    left_out = [view.name for view in facts.manifest.views if view not in facts.views]
    why = "one pair per sample"
    if facts.single_view:
        why = "one view, seen twice: augmentation makes the pair"
    if facts.plain:
        why = "one view, seen once"
    if found := facts.alignment:
        why += f"; {found.description}"
    return f"{why}; left out: {', '.join(left_out)}" if left_out else why


def _view_options(facts: Facts, view: View) -> dict[str, Any]:
    if view.kind == "text":
        tokenizer = facts.backbone.tokenizer if facts.backbone else None
        return {"tokens": TOKENS} | ({"tokenizer": tokenizer} if tokenizer else {})
    if view.kind == "graph":
        return {"augment": ["drop_nodes"]}
    if view.kind != "image":
        return {"augment": [{"noise": {"std": 0.1}}]} if len(facts.looks) > len(facts.views) else {}
    aligned = facts.alignment is not None and facts.alignment.aligned
    area = (0.7 if aligned else 0.4) if facts.single_view else 0.8
    flips = facts.alignment is not None and facts.alignment.flips
    crop: dict[str, Any] = {"crop": {"area": [area, 1.0], "flip": 0.5 if flips else 0.0}}
    colour = [{"color": {"strength": 0.2, "hue": 0.05, "grey": 0.0}}]
    steps = [crop, *(colour if facts.single_view and view.shape[-1] == 3 else [])]
    size: dict[str, Any] = (
        {"size": MAX_SIDE} if -1 in view.shape or max(view.shape[:2]) > MAX_SIDE else {}
    )
    if facts.backbone and facts.backbone.kind == "image" and facts.backbone.side:
        size = {"size": facts.backbone.side}
    return size | {"augment": steps}


def _baselines(facts: Facts) -> bool:
    """Whether scikit-learn's baselines can be fitted in the memory of one machine, in minutes."""
    if facts.kind not in ("multi_class", "multi_label") or not facts.scorable:
        return False
    columns = 0
    for view in facts.views:
        if view.kind == "graph":
            return False
        side = _view_options(facts, view).get("size")
        shape = (side, side, view.shape[-1]) if side else view.shape
        columns += 4096 if view.kind == "text" else math.prod(shape)
    tested = facts.manifest.rows(facts.test) if facts.test else facts.unlabelled
    return columns * (facts.labelled + facts.validation + tested) <= MOST_NUMBERS


def _encoder(
    views: Sequence[View], backbone: "Backbone | None", two: bool
) -> tuple[dict[str, Any], int, str]:
    """Returns the encoder for a kind of view, the width of projections, and the reasons.

    `two`: rows have one of two classes.
    """
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
        sides = [MAX_SIDE if -1 in v.shape else min(MAX_SIDE, *v.shape[:2]) for v in views]
        side, least = max(sides), min(sides)
        stages = max(1, min(4, round(math.log2(max(side, 16) / 3.5)), int(math.log2(least))))
        channels = [min(128, 32 * 2**n) for n in range(stages)]
        why = f"{side} pixels, halved {stages} times"
        encoder: dict[str, Any] = {"kind": "convnet", "channels": channels}
        if two:  # measured: a connected layer learns the few labels by heart
            grid = {"depths": [1] * stages, "places": min(3, least >> stages), "widths": []}
            why = f"{why}; two classes, so no connected layer"
            return {**encoder, "kind": "vgg", **grid}, 128, why
        encoder |= {"widths": [200], "dropout": 0.1}
        return encoder, 128, why
    widest = max(view.shape[0] for view in views)
    hidden = 1 << min(9, max(5, round(math.log2(widest))))
    encoder = {"kind": "mlp", "widths": [hidden, hidden], "dropout": 0.2}
    return encoder, min(128, hidden), f"the widest view has {widest} columns"


def experiment(path: str, facts: Facts, name: str) -> str:
    """Returns a commented experiment, as YAML: see experiment.jinja."""
    import jinja2

    batch, (protocol, why_protocol) = _batch(facts), _protocol(facts)
    larger = batch["unlabelled"] == 0 or facts.labelled > facts.unlabelled
    epoch, rows = ("labelled", facts.labelled) if larger else ("unlabelled", facts.unlabelled)
    per_epoch = max(1, rows // max(1, batch[epoch]))
    epochs = max(MIN_EPOCHS, min(MAX_EPOCHS, round(STEPS / per_epoch)))
    steps = epochs * per_epoch
    train: dict[str, Any] = {"total_steps": steps, "evaluate_every_steps": max(1, steps // 4)}
    if facts.validation and facts.scorable:
        train |= {"evaluate_every_steps": max(1, steps // 10), "keep": "best"}
    lr, why_lr = 0.002, "a learning rate for small networks"
    if facts.backbone:
        if facts.backbone.encoder.get("freeze"):
            train["frozen_views"] = FROZEN_VIEWS
        lr, why_lr = facts.backbone.lr, f"a learning rate for a backbone: {facts.backbone.why}"
    of_encoders = [[view] for view in facts.views] if facts.mixed else [facts.views]
    two = facts.kind == "multi_class" and len(facts.manifest.labels.names) == 2
    vectors = [view for view in facts.views if view.kind == "vector"]
    pictures = [view for view in facts.views if view.kind == "image"]
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"typed": as_typed, "said": _in_a_comment}
    return environment.from_string(TEMPLATE.read_text()).render(
        facts=facts,
        name=name,
        path=path,
        protocol=protocol,
        why_protocol=why_protocol,
        batch=batch,
        epoch=epoch,
        epochs=epochs,
        views=[{"stored": view.name} | _view_options(facts, view) for view in facts.looks],
        why_views=_why_views(facts),
        standardise=bool(vectors) and all(view.mean for view in vectors),
        decode_size=MAX_SIDE * 4 // 3 if any(-1 in view.shape for view in pictures) else None,
        encoders={v[0].name: _encoder(v, facts.backbone, two) for v in of_encoders},
        noun=KINDS.get(facts.views[0].kind),
        queue=max(1024, batch_of(facts.labelled)),
        lr=lr,
        why_lr=why_lr,
        baselines=_baselines(facts),
        train=train,
    )


def _in_a_comment(text: str) -> str:
    """Returns a text for a comment, in which a line break would begin a key."""
    return text if text.isprintable() else ascii(text)


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
    from heron.base.sections import parse_yaml
    from heron.experiment.config import parse_config

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
    if facts.plain and config.evaluate.baselines:
        noun = KINDS[facts.views[0].kind]
        print(f"with one {noun}, a forest may do better: the report of the run compares them")
