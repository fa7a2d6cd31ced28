"""Terms that are compared on one process and on several."""

from typing import Any

from heron.losses.named_terms import Terms
from heron.losses.terms import TermSection


def named(**options: dict[str, Any]) -> dict[str, TermSection]:
    """Terms by name, as a configuration gives them."""
    return Terms.model_validate(options).terms()


HEROCON = named(
    bce={},
    weighted_unsupervised={"weight": 0.7, "tau": 0.5},
    weighted_supervised={"weight": 0.3, "tau": 0.5},
)
HEROCON_CLIP = HEROCON | named(clip={})
MISSING = named(  # rows of which lack views and labels
    bce={},
    weighted_unsupervised={"tau": 0.5, "anchors": "first", "negatives": "cross_view"},
    weighted_supervised={"tau": 0.5},
    nt_xent={},
    cmc={},
    siglip={},
    supcon={},
    hard={"hardening": "exp"},
)
GROUPS = HEROCON | named(deepmtmv={"widths": [5, 4], "cost": 0.0, "every_epochs": 1})
SINGLE = named(bce={}, single_view_unsupervised={})
NETWORKS = named(
    plnl={
        "pretrain_epochs": 0, "warmup_epochs": 2, "consistency_epochs": 2, "epochs": 1, "sure": 0.3
    }
)  # fmt: skip
CODES = named(c2ae={"weight": 0.7})
BOTTLENECKS = named(bce={}, mib={"weight": 0.7, "beta_epochs": 2})
# Every other term, those that fit together in one step; between them, every parameter has a
# gradient.
OTHERS: dict[str, dict[str, TermSection]] = {
    "contrast of all rows": named(
        bce={},
        nt_xent={},
        clip={},
        siglip={},
        cmc={},
        input_weighted_unsupervised={},
        single_view_unsupervised={},
        debiased={},
        hard={"supervised": False, "positives": "augmentation", "hardening": "exp"},
        weighted_unsupervised={"negatives": "cross_view", "anchors": "first"},
    ),
    "contrast of labelled rows": named(
        bce={},
        supcon={},
        hierarchical={},
        hard={"hardening": "threshold", "threshold_epochs": 2},
        weighted_supervised={"distance": "indicator", "self_pairs": True},
    ),
    "hard negatives, plain": named(bce={}, hard={}, hierarchical={"constrain": False}),
    "complementary labels": named(
        ub_log={}, ub_exp={}, mse={}, gce={}, l_uw={}, mlcl={}, mulco={"queue": 13}
    ),
    "label codes": CODES,
    "bottlenecks": BOTTLENECKS,
    "pseudo-labels": named(pico={"queue": 13, "phi_epochs": 2}),
    "pseudo-labels, warm-up": named(pico={"queue": 13, "warmup_epochs": 2}),
    "far complementary labels": named(
        comco={"queue": 13, "neighbours": 2, "neighbour_epochs": 1, "warmup_epochs": 0}
    ),
} | {
    f"mulco, {kind}": named(ub_log={}, mulco={"queue": 13, "kind": kind})
    for kind in ("standard", "sifted", "soft", "debiased")
}
