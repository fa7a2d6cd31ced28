"""The facts about a data set that `heron init` chooses by."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from heron.config.errors import ConfigError
from heron.shards.manifest import Manifest, View, load_manifest
from heron.shards.show import read_index
from heron.shards.store import open_store

if TYPE_CHECKING:
    from heron.training.backbone import Backbone  # with torch, which takes a second

TEST_EVERY = 5  # without a test split, one labelled row in so many is kept for the test


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
    return Facts(manifest, views, split, test, used - validation, rest, validation, why, scorable)


def _number_of_labels(
    data: str, labelled: int, kept: int, wanted: int | None, validation: int, fewest: int
) -> int:
    """Returns the number of labelled rows to use; ConfigError for one that cannot be."""
    most = labelled - kept
    used = labelled if wanted is None else wanted
    if (wanted is not None or validation) and not labelled:
        raise ConfigError(f"{data} has no labelled rows; remove --labelled and --validation")
    if wanted is not None and wanted > most:
        why = ", and one or more must be left to test on, without a test split" if kept else ""
        raise ConfigError(
            f"--labelled must be at most {most}, got {wanted}: {labelled} rows of {data} have a "
            f"label{why}; lower it, or remove it"
        )
    if wanted is not None and wanted < fewest:
        raise ConfigError(
            f"--labelled must be at least {fewest}, got {wanted}: {data} has {fewest} classes, and "
            f"each needs a row; raise it, or remove it to use all {labelled}"
        )
    spare = used - (max(1, labelled // TEST_EVERY) if kept and wanted is None else 0) - fewest
    if validation > max(0, spare):
        raise ConfigError(
            f"--validation must be at most {max(0, spare)}, got {validation}: {fewest} or more of "
            f"{used} labelled rows must be left to train on; lower it, or use more labelled rows"
        )
    return used
