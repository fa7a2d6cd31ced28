"""Retrieval between the views of a row: does its caption find its picture?"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

AT = 1, 5, 10
STRIP = 1 << 22  # cosines at a time
TIE = 1e-6  # cosines so near are equal: rounding, which hangs on the batch, decides nothing


def cross_view_recalls(
    views: Sequence[Float[Tensor, "rows dim"]],  # projections, a tensor a view
    names: Sequence[str],  # of the views
    present: Bool[Tensor, "rows views"] | None = None,  # which views each row has
) -> dict[str, float]:
    """Returns recall@k of each view's rows by each other view's, as `recall@10_caption_image`.

    A row's query (its projection in the first view) finds the row where fewer than k other rows
    have a cosine with it, in the second view, that is as large as the row's own: of ties none
    counts for it, so that equal vectors find nothing, nor do those with NaN. By chance it is
    k / rows. Queries are rows that have both views, among rows that have the second.
    """
    unit = [normalize(view.double(), dim=1) for view in views]
    found = {}
    for u, name in enumerate(names):
        for v, other in enumerate(names):
            if present is None:
                queries, keys = unit[u], unit[v]
            else:  # the keys of the queries come first
                both, alone = present[:, u] & present[:, v], present[:, v] & ~present[:, u]
                queries, keys = unit[u][both], torch.cat([unit[v][both], unit[v][alone]])
            if u != v and len(queries):
                ranks = _ranks(queries, keys)
                for k in AT:
                    found[f"recall@{k}_{name}_{other}"] = float((ranks < k).double().mean())
    return found


def _ranks(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns how many other keys are as near to each query as its own, [queries].

    The first keys are the queries' own.
    """
    own = (queries * keys[: len(queries)]).sum(1)
    ranks = []
    for rows in torch.split(torch.arange(len(queries)), max(1, STRIP // len(keys))):
        cosines = queries[rows] @ keys.T
        near = ~(cosines < own[rows, None] - TIE)  # NaN is: it may not find
        near[torch.arange(len(rows)), rows] = False
        ranks.append(near.sum(1))
    return torch.cat(ranks)
