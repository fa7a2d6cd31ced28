"""Retrieval between the views of a row: does its caption find its picture?"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

AT = 1, 5, 10
STRIP = 1 << 22  # cosines computed at a time
TIE = 1e-6  # cosines this close are ties, so that rounding, which depends on the batch, has no say


def cross_view_recalls(
    views: Sequence[Float[Tensor, "rows dim"]],  # projections, a tensor a view
    names: Sequence[str],  # of the views
    present: Bool[Tensor, "rows views"] | None = None,  # which views each row has
) -> dict[str, float]:
    """Returns recall@k from each view to each other view, such as `recall@10_caption_image`.

    A row's projection in the first view finds its row if fewer than k other rows have, in the
    second view, a cosine at least as large as its own. Ties and NaN count against the query: equal
    vectors find nothing. Chance level is k / rows. Queries need both views, candidates the second.
    """
    unit = [normalize(view.double(), dim=1) for view in views]
    recalls = {}
    for u, name in enumerate(names):
        for v, other in enumerate(names):
            if present is None:
                queries, keys = unit[u], unit[v]
            else:  # the keys of the queries come first
                both, keys_only = present[:, u] & present[:, v], present[:, v] & ~present[:, u]
                queries, keys = unit[u][both], torch.cat([unit[v][both], unit[v][keys_only]])
            if u != v and len(queries):
                ranks = _ranks(queries, keys)
                for k in AT:
                    recalls[f"recall@{k}_{name}_{other}"] = float((ranks < k).double().mean())
    return recalls


def _ranks(queries: Tensor, keys: Tensor) -> Tensor:
    """Counts the keys that are at least as near to each query as its own key, [queries].

    The first keys belong to the queries, in order.
    """
    own = (queries * keys[: len(queries)]).sum(1)
    ranks = []
    for rows in torch.split(torch.arange(len(queries)), max(1, STRIP // len(keys))):
        cosines = queries[rows] @ keys.T
        near = ~(cosines < own[rows, None] - TIE)  # True for NaN, which must not count as found
        near[torch.arange(len(rows)), rows] = False
        ranks.append(near.sum(1))
    return torch.cat(ranks)
