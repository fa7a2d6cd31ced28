"""Exchanges by hand; benchmarks/scaling_bytes.py counts the same while processes train."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from benchmarks.scaling_bytes import arithmetic, received
from heron.config.model import Cnn, ModelConfig
from heron.config.terms import Needs, Term, Terms
from heron.distributed.traffic import Exchange, exchanges, norms
from heron.models.heterogeneous import Heterogeneous
from heron.objectives.batch import GlobalBatch
from heron.objectives.exchange import ShardSizes
from heron.objectives.objective import Objective

SHAPES = [(16, 16, 3)] * 2


class Compared(Term):
    """A loss that takes the gradients of others' rows, as one of a user's own may."""

    needs: ClassVar[Needs] = Needs(gathered=("projections",))

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """The length of all projections."""
        return torch.cat([*batch.projections]).square().sum()


def built(terms: Mapping[str, Any], **options: object) -> tuple[Objective, Heterogeneous]:
    objective = Objective(Terms.model_validate(terms).terms())
    config = ModelConfig.model_validate(
        {"encoder": Cnn(channels=[4, 6]), "projection_width": 8} | options
    )
    return objective, Heterogeneous(config, SHAPES, 5, objective.terms)


def test_meetings_of_batch_norm() -> None:
    """Two convolutions, then the projector; at each, both parts of both views at once."""
    _, model = built({"nt_xent": {}})
    assert norms(model, SHAPES, [3, 2], 5) == [[4] * 4, [6] * 4, [8] * 4]
    assert norms(model, SHAPES, [3], 5) == [[4] * 2, [6] * 2, [8] * 2]
    _, shared = built({"nt_xent": {}}, shared_encoder=True, shared_projector=True)
    assert norms(shared, SHAPES, [3], 5) == [[4] * 2, [6] * 2, [8] * 2]  # passed once a view
    _, bare = built({"nt_xent": {}}, projector="mlp")
    assert norms(bare, SHAPES, [3], 5) == [[4] * 2, [6] * 2]
    bare.encoders[0].eval()  # frozen
    assert norms(bare, SHAPES, [3, 2], 5) == [[4] * 2, [6] * 2]
    encoders = {"other": {"kind": "cnn", "channels": [3, 5, 7]}}
    config = ModelConfig.model_validate({"encoder": Cnn(channels=[4, 6]), "encoders": encoders})
    terms = Terms.model_validate({"bce": {}}).terms()
    unlike = Heterogeneous(config, SHAPES, 5, terms, ["one", "other"])
    assert norms(unlike, SHAPES, [3], 5) == [[4, 3], [6, 5], [7]]


def test_one_process_exchanges_nothing() -> None:
    assert exchanges(*built({"nt_xent": {}}), SHAPES, ShardSizes([4], [9]), 5) == []


def test_what_terms_need_is_what_is_gathered() -> None:
    """Shares of 3 and 2 labelled rows and of 4 and 5 others: the first has most to send.

    By one collective, and back goes nothing but the slopes by the sums of L_u and L_s.
    """
    objective, model = built({"bce": {}, "weighted_unsupervised": {}, "weighted_supervised": {}})
    moved = exchanges(objective, model, SHAPES, ShardSizes([3, 2], [4, 5]), 5)
    found = {(e.kind, e.content): (e.bytes, e.calls) for e in moved}
    weights = sum(parameter.numel() for parameter in model.parameters())
    channels = [4, 6, 4, 6, 8, 8] * 2
    assert found == {
        ("gathered", "projections"): (4 * 7 * 2 * 8, 0),
        ("gathered", "weights"): (4 * 7 * 2 * 8, 0),
        ("gathered", "hidden"): (4 * 3 * 12, 0),
        ("gathered", "labels"): (4 * 3 * 5, 1),
        ("gathered", "sums of weighted_unsupervised"): (4 * 7 * 2, 1),
        ("gathered", "sums of weighted_supervised"): (4 * 3 * 2 * 5, 1),
        ("gathered", "moments"): (4 * sum(2 * n + 1 for n in channels), 3),
        ("statistics", "sums"): (4 * 2 * sum(channels), 3),
        ("gradients", "gradients"): (4 * weights, 1),
    }
    inputs, inputs_model = built({"input_weighted_unsupervised": {}})
    of_inputs = exchanges(inputs, inputs_model, SHAPES, ShardSizes([0, 0], [4, 5]), 5)
    assert [e.bytes for e in of_inputs if e.content == "inputs"] == [4 * 5 * 2 * 16 * 16 * 3]
    single = exchanges(
        *built({"single_view_unsupervised": {}}), SHAPES, ShardSizes([0, 0], [4, 5]), 5
    )
    gathered = [e.content for e in single if e.kind == "gathered"]  # inputs stay where they are
    told = ["sums of single_view_unsupervised"] * 2
    compared = ["projections", "weights", "input_projections"]
    assert gathered == [*compared, "labels", *told, "moments"]
    slopes = [e.bytes for e in of_inputs if e.content == "sums of input_weighted_unsupervised"]
    assert slopes == [4 * 5 * 2]
    term: dict[str, Any] = {f"{Compared.__module__}.Compared": {}}
    own = exchanges(*built(term), SHAPES, ShardSizes([0, 0], [4, 5]), 5)
    every = [*single, *of_inputs, *own]
    back = [(e.content, e.bytes, e.calls) for e in every if e.kind == "scattered"]
    assert back == [("projections", 4 * 5 * 2 * 8, 2)]  # of the loss of one's own
    few = exchanges(*built({"nt_xent": {}}), SHAPES, ShardSizes([0, 0], [4, 5]), 5, half=True)
    assert [e.bytes for e in few if e.content == "projections"] == [2 * 5 * 2 * 8]


def test_views_of_other_widths_tell_slopes_for_each_view_of_anchors() -> None:
    term, shapes = Terms.model_validate({"input_weighted_unsupervised": {}}).terms(), [(3,), (4,)]
    (objective,) = term.values()
    assert objective.exchanged_sums(shapes, 5, 0) == [2, 2]
    assert objective.exchanged_sums(shapes[:1] * 2, 5, 0) == [2]


@pytest.mark.parametrize(("width", "calls"), [(8, 1), (3600, 1), (3700, 2), (7400, 5)])
def test_gradients_go_in_buckets_of_25_mib(width: int, calls: int) -> None:
    """A layer of w / 2 x w weights has up to 110 million bytes here."""
    terms = Terms.model_validate({"bce": {}}).terms()
    with torch.device("meta"):
        layers = [width // 2, width]
        config = ModelConfig.model_validate({"encoder": {"kind": "mlp", "widths": layers}})
        model = Heterogeneous(config, [(4,)], 5, terms)
    weights = sum(parameter.numel() for parameter in model.parameters())
    (moved,) = [
        e
        for e in exchanges(Objective(terms), model, [(4,)], ShardSizes([3, 2], [0, 0]), 5)
        if e.kind == "gradients"
    ]
    assert moved.bytes == 4 * weights
    assert moved.calls == -(-4 * weights // (25 * 2**20)) == calls


def test_bytes_received_count_the_others_parts() -> None:
    moved = [Exchange("gathered", "a", 3, 5), Exchange("gradients", "b", 1, 7)]
    assert received(moved, 4) == pytest.approx(
        {"gathered": 3 * 60, "passed": 0, "scattered": 0, "statistics": 0, "gradients": 28}
    )
    assert arithmetic(moved[0]) == "4 x 3 x 5" and arithmetic(moved[1]) == "4 x 7"
