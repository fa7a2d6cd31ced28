"""Draws scores that stand on pages: `python docs/make_published.py`.

Every published score beside ours must stand in docs/results.md, which says how it was measured.
Those of faces are read from the table of docs/faces.md.
"""

import re
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
INK, GREY, ABOVE, BELOW = "#333333", "#bbbbbb", "#1b6ca8", "#c44e52"
# What, the paper's, ours; "reduced": on less data, or with fewer negatives, than in the paper.
SCORES = [
    ("HeroCon on Scene, F1", ".6366", ".6616"),
    ("HeroCon on Scene, AUC", ".8878", ".8957"),
    ("MulCo on Texture, accuracy", ".9464", ".9818"),
    ("MulCo on Dermatology, accuracy", ".9844", ".9811"),
    ("MulCo on Yeast, accuracy", ".5720", ".5777"),
    ("MulCo on KMNIST, s = 5, accuracy", ".7059", ".8309"),
    ("H-SCL(β) on MUTAG, accuracy", ".872", ".8731"),
    ("H-SCL(β) on PTC, accuracy", ".577", ".6220"),
    ("HeroCon on N-MNIST, F1, reduced", ".9363", ".9164"),
    ("HeroCon on N-MNIST, AUC, reduced", ".9705", ".9942"),
    ("HeroCon on CelebA, F1, reduced", ".5907", ".5584"),
    ("HeroCon on CelebA, AUC, reduced", ".7544", ".7395"),
]


def unstated() -> list[str]:
    """Returns the names of those of which docs/results.md does not have both numbers."""
    stated = set(re.findall(r"\.\d{3,4}\b", (DOCS / "results.md").read_text()))
    return [name for name, *scores in SCORES if not stated.issuperset(scores)]


FACES = ["pretrained, frozen, HeroCon", "the same, new augmentations"]
FACES += ["pretrained, frozen, logistic regression", "logistic regression on pixels"]


def faces() -> None:
    """Writes docs/pictures/faces.png, with the AUC of the first rows of the page's table."""
    page = (DOCS / "faces.md").read_text()
    table = [line for line in page.splitlines() if "| ." in line]
    figure = Figure(figsize=(7, 1.9))
    axes = figure.add_subplot()
    for y, (name, line) in enumerate(zip(FACES, table, strict=False)):
        values = [float(word) for word in re.findall(r"(?<![\d\w])\.\d+", line.split("|")[2])]
        axes.scatter(values, [y] * len(values), 34, GREY if "pixels" in name else ABOVE)
    axes.set_yticks(range(len(FACES)), FACES)
    axes.set_ylim(len(FACES) - 0.5, -0.5)
    axes.set_xlabel("AUC")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.savefig(DOCS / "pictures" / "faces.png", dpi=110, bbox_inches="tight")


def published() -> None:
    """Writes docs/pictures/published.png."""
    if names := unstated():
        raise SystemExit(f"{', '.join(names)}: not as in docs/results.md; expected its numbers")
    figure = Figure(figsize=(8, 3.2))
    axes = figure.add_subplot()
    for y, (_, *scores) in enumerate(SCORES):
        paper, ours = map(float, scores)
        colour = ABOVE if ours >= paper else BELOW
        axes.plot([paper, ours], [y, y], color=colour, linewidth=2.5, alpha=0.45, zorder=1)
        first = y == 0
        axes.scatter(paper, y, 34, "white", edgecolor=INK, label="published" if first else None)
        axes.scatter(ours, y, 34, colour, zorder=3, label="measured" if first else None)
    axes.set_yticks(range(len(SCORES)), [name for name, *_ in SCORES])
    axes.invert_yaxis()
    axes.grid(axis="x", color=GREY, linewidth=0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.legend(frameon=False, loc="lower right", ncols=2)
    figure.savefig(DOCS / "pictures" / "published.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    published()
    faces()
