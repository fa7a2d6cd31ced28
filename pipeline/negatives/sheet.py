"""Contact sheets of the report on negatives: near pairs, side by side."""

import base64
import html
from io import BytesIO

from PIL import Image

from heron.pipeline.negatives.measure import Negatives, examples
from heron.pipeline.retrieval.pictures import Pictures
from heron.pipeline.retrieval.samples import Samples
from heron.pipeline.training.page import paragraph

SIDE = 192  # of a picture, in pixels, at most


def sheet(found: Negatives, relation: str, pictures: Pictures | None) -> str:
    """Near pairs side by side, with what they have in common and what not.

    Args:
        found: near pairs and their labels.
        relation: of them to show, `hard` or `false`.
        pictures: of the samples; None: their labels alone.
    """
    samples = found.pairs.samples
    chosen = examples(found, relation)
    if not chosen:
        return paragraph("There are none among the nearest.")
    both = samples.targets[found.pairs.anchors[[row for row, _ in chosen]]].astype(int)
    both *= samples.targets[[found.numbers[place] for place in chosen]]
    often = int(both.sum(0).argmax())
    cosine = [float(found.cosine[place]) for place in chosen]
    said = (
        f"The {len(chosen)} most similar, no sample twice, of cosine {cosine[-1]:.4f} to "
        f"{cosine[0]:.4f}. "
    )
    if count := int(both.sum(0)[often]):
        said += f"In {count} of them both samples have '{samples.names[often]}'. "
    said += "Red: labels that only one of the two has."
    cells = []
    for row, column in chosen:
        two = int(found.pairs.anchors[row]), int(found.numbers[row, column])
        left, right = (samples.label_names(number) for number in two)
        lines = [
            f"cosine {found.cosine[row, column]:.4f}, label distance "
            f"{found.level[row, column] / found.pairs.scale:.3g}, neighbour {column + 1}",
            f"{samples.key(two[0])} and {samples.key(two[1])}",
            f"both: {', '.join(n for n in left if n in right) or 'none'}",
        ]
        only = [
            f"{side} only: {', '.join(names)}"
            for side, names in (
                ("left", [n for n in left if n not in right]),
                ("right", [n for n in right if n not in left]),
            )
            if names
        ]
        shown = "".join(_picture(pictures, samples, number) for number in two)
        text = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
        differ = "".join(f'<p class="only">{html.escape(line)}</p>' for line in only)
        cells.append(f'<div class="pair">{shown}{text}{differ}</div>')
    return f'{paragraph(said)}<div class="pairs">{"".join(cells)}</div>'


def _picture(pictures: Pictures | None, samples: Samples, number: int) -> str:
    picture = None if pictures is None else pictures.of(samples, number)
    if picture is None:
        return ""
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    out = BytesIO()
    picture.save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{html.escape(samples.key(number))}" src="data:image/png;base64,{data}"> '
