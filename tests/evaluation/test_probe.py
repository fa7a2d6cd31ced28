"""The linear probe: logistic regression by its definition, and what it does without examples."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from heron.evaluation.probe import linear_probe


def draw(rows: int, classes: int, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Overlapping clouds, a class each, with columns of very different scales."""
    generator = np.random.default_rng(seed)
    numbers = np.arange(rows) % classes
    centres = np.random.default_rng(9).normal(size=(classes, 5))
    x = (centres[numbers] + generator.normal(size=(rows, 5))) * [1, 10, 0.1, 1, 100] + 3
    return x.astype(np.float32), np.eye(classes, dtype=np.float32)[numbers]


def fit_by_descent(x: torch.Tensor, y: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """argmin_W sum_i -log softmax(W x_i + b)[y_i] + |W|^2 / 2, on standardised x, in float64."""
    mean, std = x.mean(0), x.std(0, correction=0)
    x, asked = (x - mean) / std, (asked - mean) / std
    weight = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(y.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = -(y * (x @ weight + bias).log_softmax(1)).sum() + weight.square().sum() / 2
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return (asked @ weight + bias).softmax(1).detach()


def test_classes_are_told_apart_as_the_definition_says() -> None:
    (x, y), (others, _) = draw(60, 4), draw(30, 4, seed=1)
    found = linear_probe(x, y, others, exclusive=True)
    expected = fit_by_descent(*(torch.from_numpy(a).double() for a in (x, y, others)))
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-3)
    assert found.dtype == np.float32


def test_labels_are_a_classifier_each() -> None:
    (x, y), (others, _) = draw(60, 4), draw(30, 4, seed=1)
    y = np.concatenate([y[:, :2], y[:, :1] + y[:, 2:3]], 1)
    found = linear_probe(x, y, others, exclusive=False)
    for label in range(3):
        two = np.stack([1 - y[:, label], y[:, label]], 1)
        alone = linear_probe(x, two, others, exclusive=True)
        np.testing.assert_array_equal(found[:, label], alone[:, 1])


def test_a_feature_that_says_nothing_and_its_scale_change_nothing() -> None:
    (x, y), (others, _) = draw(60, 3), draw(30, 3, seed=1)
    plain = linear_probe(x, y, others, exclusive=True)
    wide, asked = (
        np.concatenate([a * np.float32(4), np.full((len(a), 1), 7, np.float32)], 1)
        for a in (x, others)
    )
    np.testing.assert_allclose(linear_probe(wide, y, asked, exclusive=True), plain, atol=1e-4)


def test_the_same_rows_give_the_same_bits() -> None:
    (x, y), (others, _) = draw(60, 4), draw(30, 4, seed=1)
    one, two = (linear_probe(x, y, others, exclusive=True) for _ in range(2))
    assert np.array_equal(one, two)


@pytest.mark.parametrize("exclusive", [True, False])
def test_what_no_example_shows_is_predicted_as_the_examples_have_it(exclusive: bool) -> None:
    (x, y), (others, _) = draw(60, 4), draw(30, 4, seed=1)
    kept = y[:, :2].any(1)  # no example of classes 2 and 3
    found = linear_probe(x[kept], y[kept], others, exclusive)
    assert (found[:, 2:] == 0).all()
    assert (found[:, :2] > 0).all()
    one = y[:, 1] == 1  # nothing but class 1
    alone = linear_probe(x[one], y[one], others, exclusive)
    assert (alone == [0, 1, 0, 0]).all()


def test_rows_that_lie_apart_are_all_told_apart() -> None:
    x = np.array([[0.0], [0.1], [1.0], [1.1]], np.float32)
    y = np.eye(2, dtype=np.float32)[[0, 0, 1, 1]]
    found = linear_probe(x, y, np.array([[-1.0], [2.0]], np.float32), exclusive=True)
    assert found.argmax(1).tolist() == [0, 1]
