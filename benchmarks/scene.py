"""Seconds an epoch on Scene: our step, and the published code's arithmetic, in one run.

    python -m benchmarks.scene        # needs data/scene; see README.md

The peer does what HeroCon's code does in a step, in float64 on whole N x N matrices: the same model
and rows, three products and three exponentials a pair, cross-view negatives, the supervised term
label by label, autograd, LARC. The two take turns; medians are compared.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from heron.data.batches import Batch, batches
from heron.data.streams import ShardBatches
from heron.data.views import Views
from heron.experiment.config import load_config
from heron.experiment.open_data import open_data
from heron.losses.exchange import ShardSizes
from heron.losses.objective import Objective, gather_batch
from heron.models.heterogeneous import Features, Heterogeneous
from heron.training.optim import build_optimizer


def cosine(a: Tensor, b: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(a, dim=1)[:, None] * torch.linalg.vector_norm(b, dim=1)
    return torch.mm(a, b.T).div(lengths.clamp(min=1e-15))


def published(features: Features, y: Tensor, alpha: float, beta: float) -> Tensor:
    """The objective on whole matrices."""
    count, labels = y.shape
    classify = torch.nn.functional.binary_cross_entropy_with_logits(
        features["logits"][0][:count], y
    )
    (z1, z2), (h1, h2) = features["projections"], features["weights"]
    g = (torch.exp(1 - cosine(h1, z2)) + torch.exp(1 - cosine(z1, h2))) / 2
    f = torch.exp(cosine(z1, z2))
    unsupervised = torch.log((g * f).sum(0) / f.diag()).mean()
    s = features["hidden"][0][:count]
    dist = y @ (1 - y).T + (1 - y) @ y.T
    supervised = s.new_zeros(())
    for a in range(labels):
        in_class = y[:, a] == 1
        attract = torch.exp(cosine(s[in_class], s[in_class])) * (
            1 - dist[in_class][:, in_class] / labels
        )
        repel = torch.exp(cosine(s[in_class], s[~in_class])) * dist[in_class][:, ~in_class]
        supervised = supervised + torch.log((repel.sum(1) + attract) / attract).mean()
    return classify + alpha * unsupervised + beta * supervised


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/scene.yaml")
    parser.add_argument("--epochs", type=int, default=7)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    streams = open_data(config)
    device = torch.device("cpu")
    views = Views(streams.reader, config.data, device)
    source = ShardBatches(streams, config.seed, 0, 1)
    assert streams.labelled is not None and streams.unlabelled is not None
    sizes = ShardSizes([streams.labelled.batch], [streams.unlabelled.batch])
    objective = Objective(config.objective)
    weights = objective.weights(0)

    def step(
        dtype: torch.dtype, loss: Callable[[Features, Batch], Tensor]
    ) -> Callable[[int], float]:
        torch.manual_seed(0)
        shapes = [streams.reader.view(view.stored).shape for view in config.data.views]
        model = Heterogeneous(config.model, shapes, 6, objective.terms)
        model.to(dtype)
        optimizer = build_optimizer(config.optim, model.parameters())

        def timed(t: int) -> float:
            start = time.perf_counter()
            batch = next(batches(source, t, t + 1, workers=0))
            inputs = [x.to(dtype) for x in views(batch, train=True)]
            optimizer.zero_grad()
            loss(model(inputs, batch.rng_keys, batch.sizes), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return time.perf_counter() - start

        return timed

    heron_step = step(
        torch.float32, lambda f, b: objective(gather_batch(f, b, [], sizes, objective))[0]
    )
    alpha, beta = weights["weighted_unsupervised"], weights["weighted_supervised"]
    published_step = step(torch.float64, lambda f, b: published(f, b.targets.double(), alpha, beta))
    for timed in (heron_step, published_step):
        timed(0)
    pairs = [(heron_step(t), published_step(t)) for t in range(1, arguments.epochs + 1)]
    heron_median, published_median = (
        statistics.median(seconds) for seconds in zip(*pairs, strict=True)
    )
    print(f"{torch.get_num_threads()} threads, {sum(sizes.rows):,} rows, cross-view negatives")
    print("| | seconds an epoch |")
    print("|---|---|")
    print(f"| Heron, float32 | {heron_median:.3f} |")
    print(f"| published arithmetic, float64 | {published_median:.3f} |")
    print(f"| ratio, median of pairs | {statistics.median(b / a for a, b in pairs):.1f} |")


if __name__ == "__main__":
    main()
