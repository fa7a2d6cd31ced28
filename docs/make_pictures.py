"""Draws the pictures of the guides from the code itself: `python docs/make_pictures.py [NAME ...]`.

Each function below is a picture. Those that need a run do it on drawn data, in minutes on a core.
"""

import hashlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

from heron.data import pictures as augment
from heron.data.augmentations import Blur, Color, Crop
from heron.data.plan import Stream, even_slice
from heron.data.rows import Listed
from heron.sources import make_source
from heron.studies.drive import goes_on
from heron.studies.study import Study

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
TEN = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
INK, GREY = "#333333", "#bbbbbb"
matplotlib.rcParams.update({"font.size": 9})


def save(figure: Figure, name: str) -> None:
    """Writes a picture of 256 colours on white, so that it is legible on a dark page too."""
    written = io.BytesIO()
    figure.savefig(written, dpi=110, facecolor="white", bbox_inches="tight")
    Image.open(written).convert("RGB").quantize(256).save(PICTURES / name, optimize=True)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure whose units are cells, y downwards, without axes."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.invert_yaxis()
    return figure, axes


def box(axes: Axes, x: float, y: float, w: float, h: float, text: str, color: Any) -> None:
    """Draws a rounded box with lines of text in it."""
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, facecolor=color, edgecolor=INK))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", color=INK, linespacing=1.4)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draws an arrow."""
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def streams() -> None:
    """Draws how an epoch's batches follow from the shards, by the plan that training uses."""
    shards = [np.arange(8 * n, 8 * n + 8) for n in range(6)]
    order = Stream(
        "labelled", Listed.from_shards(shards), batch=12, seed=3, n_streams=4, window_rows=8
    )
    line = replace(order, window_rows=1).order(0)  # of one row: shards permuted, not shuffled
    figure, axes = canvas(9.5, 4.6)

    def cells(y: float, rows: Iterable[int], x: float = 0) -> None:
        for place, row in enumerate(rows):
            axes.add_patch(
                Rectangle((x + place, y), 1, 1, facecolor=TEN[row // 8], alpha=0.6, edgecolor="w")
            )
            axes.text(x + place + 0.5, y + 0.5, str(row), ha="center", va="center", fontsize=7)

    def says(y: float, text: str) -> None:
        axes.text(-1, y, text, ha="right", va="center", color=INK)

    for n, shard in enumerate(shards):
        cells(0, shard, 8 * n + 0.6 * n)
    says(0.5, "six shards of 8 rows")
    gap = 1.0
    for c in range(4):
        cells(3, line[c], c * (12 + gap))
        cells(6, order.order(0)[c], c * (12 + gap))
        axes.text(c * (12 + gap) + 6, 7.7, f"stream {c}", ha="center", color=INK, fontsize=8)
    says(3.5, "permuted, laid end to end,\ncut into C = 4 streams")
    says(6.5, "each shuffled within\na window of rows")
    for t in range(4):
        batch = order.batch_rows(t)
        for rank in range(2):
            own = even_slice(12, rank, 2)
            cells(10 + 1.5 * t, batch[own], own.start + 2.5 * rank)
        says(10.5 + 1.5 * t, f"global batch {t}: 3 rows of every stream" if not t else f"{t}")
    for rank in range(2):
        axes.text(3 + 8.5 * rank, 9.5, f"process {rank}", ha="center", color=INK)
    axes.set_xlim(-17, 52)
    axes.set_ylim(16.2, -0.5)
    save(figure, "streams.png")


def views() -> None:
    """Draws what each augmentation makes of a drawn face."""
    source = make_source("faces", {"train": 24, "test": 1, "size": 96})
    face = Image.open(io.BytesIO(source.read("train", 5, 6).views["image"][0]))
    x = torch.tensor(np.asarray(face)).permute(2, 0, 1)[None].float() / 255
    draws = torch.rand(4, augment.DRAWS, generator=torch.Generator().manual_seed(7))
    x = x.expand(4, -1, -1, -1)
    made = {
        "crop": augment.crop(x, Crop(), draws, (96, 96)),
        "color": augment.color(x, Color(), draws),
        "blur": augment.blur(x, Blur(probability=1.0), draws),
    }
    figure = Figure(figsize=(7.2, 4.5))
    for row, (name, pictures) in enumerate(made.items()):
        for column, picture in enumerate([x[0], *pictures]):
            axes = figure.add_subplot(3, 5, 5 * row + column + 1)
            axes.imshow(picture.permute(1, 2, 0).clamp(0, 1).numpy())
            axes.set_xticks([])
            axes.set_yticks([])
            if not column:
                axes.set_ylabel(name, rotation=0, ha="right", va="center")
            if not row:
                axes.set_title("stored" if not column else f"epoch {column}", fontsize=9)
    figure.subplots_adjust(wspace=0.05, hspace=0.05)
    save(figure, "views.png")


def step() -> None:
    """Draws one step on two processes: whose rows are anchors, and what is gathered."""
    figure, axes = canvas(9, 4)
    for rank, color in enumerate(("#cfe3f5", "#fbdcc0")):
        y = 3.2 * rank
        box(axes, 0, y, 2, 2, f"process {rank}\nits share of the\nglobal batch", color)
        box(axes, 2.8, y, 2, 2, "encoder,\nprojector", color)
        box(axes, 5.6, y, 1.4, 2, "z of its\nown rows", color)
        arrow(axes, (2, y + 1), (2.8, y + 1))
        arrow(axes, (4.8, y + 1), (5.6, y + 1))
        arrow(axes, (7, y + 1), (8, 2.6))
        left, top = 11.2, y - 0.1
        for part, other in enumerate(("#cfe3f5", "#fbdcc0")):
            axes.add_patch(
                Rectangle((left + 2 * part, top + 0.5), 2, 1.2, facecolor=other, edgecolor=INK)
            )
        axes.text(left + 2, top + 0.1, "keys: all rows", ha="center", va="center", fontsize=8)
        axes.text(
            left - 0.15,
            top + 1.1,
            "anchors:\nown rows",
            ha="right",
            va="center",
            fontsize=8,
            color=INK,
        )
        arrow(axes, (9, 2.6), (left - 1.6, top + 1.1))
        for line in np.arange(0.8, 1.6, 0.3):
            axes.plot([left, left + 4], [top + line] * 2, color=INK, linewidth=0.5, linestyle=":")
        says = "logits, a strip at a time:\nthis process's share of the loss"
        axes.text(left + 2, top + 2.2, says, ha="center", va="center", color=INK)
    box(axes, 8, 1.6, 1, 2, "all-\ngather", "#e6e6e6")
    axes.text(
        8,
        6,
        "The backward pass of the gather sums what each process found for a row: "
        "the gradients are those of one process.",
        ha="center",
        va="center",
        color=INK,
    )
    axes.set_xlim(-0.2, 15.4)
    axes.set_ylim(6.4, -0.2)
    save(figure, "step.png")


def pairs() -> None:
    """Draws which pairs of a small batch attract and which repel, and how much, for four terms."""
    labels = np.array([[1, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 1], [0, 0, 1]])
    names = ["".join(n for n, one in zip("abc", row, strict=True) if one) for row in labels]
    count, views = len(labels), 2
    sample = np.repeat(np.arange(count), views)
    y = labels[sample]
    distance = np.abs(y[:, None] - y[None]).sum(2) / y.shape[1]
    same, equal = sample[:, None] == sample[None], distance == 0
    itself = np.eye(count * views, dtype=bool)
    terms = {
        "nt_xent: one positive, all others\nrepel alike": (same & ~itself, ~same * 1.0),
        "supcon: equal labels attract": (equal & ~itself, ~equal * 1.0),
        "weighted_supervised, label b: repels\nby label distance; one vector a row": (
            (y[:, None, 1] * y[None, :, 1] == 1) & ~same,
            (y[:, None, 1] * (1 - y[None, :, 1])) * distance,
        ),
        "hard: of other classes,\nthe nearest repel most": (equal & ~itself, None),
    }
    near = np.random.default_rng(1).random((count, count))[np.ix_(sample, sample)]
    figure = Figure(figsize=(9.6, 3.1))
    for place, (title, (positive, negative)) in enumerate(terms.items()):
        weights = ~equal * near**2 if negative is None else negative
        axes = figure.add_subplot(1, 4, place + 1)
        colors = np.ones((count * views, count * views, 3)) * 0.93
        colors[weights > 0] = 1 - weights[weights > 0, None] * (1 - np.array([0.85, 0.2, 0.15]))
        colors[positive] = [0.16, 0.44, 0.7]
        axes.imshow(colors)
        axes.set_xticks(np.arange(count) * views + 0.5, names)
        axes.set_yticks(np.arange(count) * views + 0.5, names)
        axes.set_xticks(np.arange(1, count) * views - 0.5, minor=True)
        axes.set_yticks(np.arange(1, count) * views - 0.5, minor=True)
        axes.grid(which="minor", color="w", linewidth=1.5)
        axes.tick_params(length=0, which="both")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("keys, two views each")
        if not place:
            axes.set_ylabel("anchors, by their labels")
    figure.tight_layout()
    save(figure, "pairs.png")


SMALL = [
    "--config", str(ROOT / "configs" / "frames.yaml"), "data.build.train=3000",
    "data.build.test=300", "data.protocol.labelled=100", "data.batch.labelled=50",
    "data.batch.unlabelled=150", "train.epochs=8", "train.save_every_steps=10",
    "train.evaluate_every_epochs=null",
]  # fmt: skip


def run(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """Starts a small run in a folder."""
    command = [sys.executable, str(ROOT / "pipeline" / "pretrain.py"), *SMALL, *more]
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})


def losses(run: Path) -> dict[int, float]:
    """Returns the loss of each step that a run has written so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()[:-1] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def killed() -> None:
    """Draws the losses of a run that was stopped and went on, over those of one that was not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert run(folder, "run.dir=straight").wait() == 0
        leg = run(folder, "run.dir=stopped")
        while max(losses(folder / "stopped"), default=0) < 70:
            time.sleep(0.05)
        leg.send_signal(signal.SIGTERM)
        assert leg.wait() == 75
        last = max(losses(folder / "stopped"))
        assert run(folder, "run.dir=stopped", "run.resume=auto").wait() == 0
        straight, stopped = losses(folder / "straight"), losses(folder / "stopped")
    assert straight == stopped
    figure = Figure(figsize=(7.5, 2.8))
    axes = figure.add_subplot()
    axes.plot([*straight], [*straight.values()], color=GREY, linewidth=5, label="never stopped")
    for color, name, steps in (
        (TEN[0], "until SIGTERM: saved, status 75", [s for s in stopped if s <= last]),
        (TEN[1], "again, with run.resume=auto", [s for s in stopped if s > last]),
    ):
        axes.plot(steps, [stopped[s] for s in steps], color=color, linewidth=1.2, label=name)
    axes.axvline(last, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "stopped.png")


def report() -> None:
    """Photographs the report of the default run, which has ended in runs/faces."""
    from make_screenshots import photograph

    page = (ROOT / "runs" / "faces" / "report.html").as_uri()
    with tempfile.TemporaryDirectory() as name:
        wide = photograph(page, "report", Path(name), "html[data-drawn]")[0]
        with Image.open(wide) as picture:
            picture.crop((0, 0, picture.width, 1600)).save(PICTURES / "report.png")


def chain() -> None:
    """Draws what names what among the artefacts of a small run, as their manifests have it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert run(folder, "run.dir=run", "train.steps=3").wait() == 0
        for words in ("embed run --out embeddings", "index embeddings --out index"):
            command = [sys.executable, "-m", "heron", *words.split()]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            subprocess.run(command, cwd=folder, check=True, env=environment)
        (state,) = (folder / "run/checkpoints").glob("step-*/state.json")
        manifests = {
            "data set": folder / "data/frames/manifest.json",
            "checkpoint": state,
            "embeddings": folder / "embeddings/manifest.json",
            "index": folder / "index/manifest.json",
        }
        texts = {n: path.read_text() for n, path in manifests.items()}
        weights = hashlib.sha256((state.parent / "model.safetensors").read_bytes()).hexdigest()
    prints = {name: str(json.loads(text)["fingerprint"]) for name, text in texts.items()}
    figure, axes = canvas(8.5, 2.9)
    for place, (name, text) in enumerate(texts.items()):
        box(axes, 3.1 * place, 0, 2.4, 1, f"{name}\n{prints[name][:15]}…", "#e8eef4")
        named = [o for o in prints if prints[o] in text or (o == "checkpoint" and weights in text)]
        for other in named:
            back = place - [*prints].index(other)
            if back > 0:
                _names(axes, 3.1 * place, 3.1 * (place - back), back)
    axes.set_xlim(-0.2, 12)
    axes.set_ylim(2.3, -0.2)
    save(figure, "fingerprints.png")


def _names(axes: Axes, start: float, end: float, back: int) -> None:
    """Draws an arrow from a box to one before it: straight to its neighbour, else from below."""
    if back == 1:
        arrow(axes, (start, 0.5), (end + 2.4, 0.5))
        return
    depth, left, right = 0.45 * back + 0.45 * (start > 9) + 0.4, end + 2.2 - 0.4 * back, start + 0.8
    right += 0.4 * (3 - back)
    axes.plot([right, right, left], [1, depth, depth], color=INK, linewidth=1)
    arrow(axes, (left, depth), (left, 1))


def tutorial() -> None:
    """Follows the tutorial and keeps its two sheets."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    blocks = {
        language: re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
        for language in ("python", "yaml", "bash")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for room in ("pipeline", "launch", "configs"):
            (folder / room).symlink_to(ROOT / room)
        (folder / "draw.py").write_text(blocks["python"][0])
        (folder / "shapes.yaml").write_text(blocks["yaml"][0])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
        for command in "".join(blocks["bash"]).splitlines():
            if not command.startswith(("source", "heron serve")):
                subprocess.run(shlex.split(command), cwd=folder, check=True, env=environment)
        for made, kept in (("shapes.png", "shapes.png"), ("near.png", "rings.png")):
            sheet = Image.open(folder / made).convert("RGB")
            sheet.quantize(256).save(PICTURES / kept, optimize=True)


def halving() -> None:
    """Draws which of 16 trials with made-up scores go on at each rung of ASHA, by its code."""
    draw = np.random.default_rng(4)
    search = {
        "sampler": "random",
        "scheduler": "asha",
        "trials": 16,
        "steps": 800,
        "grace_steps": 50,
        "factor": 4,
    }
    measure = {"x": "optim.lr", "y": ["f1_weighted"], "score": "f1_weighted"}
    tree = {"title": "ASHA", "base": "configs/frames.yaml", "vary": {"optim.lr": [0.1]}}
    study = Study.model_validate(tree | {"search": search, "measure": measure})
    rungs = [n for n in study.search.rungs if n is not None]
    figure = Figure(figsize=(7, 3.6))
    axes = figure.add_subplot()
    with tempfile.TemporaryDirectory() as out:
        for trial in range(16):
            best, on, column = draw.uniform(0.3, 0.9), True, 0
            while on and column < len(rungs):
                score = float(best * (1 - 0.5 ** (column + 1)) + draw.normal(0, 0.02))
                at = {"step": rungs[column], "f1_weighted": score}
                on = column + 1 < len(rungs) and goes_on(study, Path(out), f"{trial:03}", at)
                column += 1
                axes.text(
                    column, trial - 0.1, f"{score:.2f}", ha="right", va="bottom", fontsize=6.5
                )
            color = TEN[0] if column == len(rungs) else "0.6"
            axes.plot([0, column], [trial, trial], color=color, linewidth=2.5)
    axes.set_xticks(range(len(rungs) + 1), ["start", *(f"{n} steps" for n in rungs)])
    axes.set_yticks([])
    axes.set_ylim(16, -1)
    axes.set_ylabel(
        "trials, in the order\nin which they began", rotation=0, ha="right", va="center"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    save(figure, "halving.png")


DRAWN = (streams, views, step, pairs, halving, killed, report, chain, tutorial)


if __name__ == "__main__":
    for drawing in DRAWN:
        if not sys.argv[1:] or drawing.__name__ in sys.argv[1:]:
            drawing()
