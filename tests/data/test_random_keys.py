"""Counter-based random numbers: a function of what they are for, and uniform."""

import numpy as np
import pytest
import torch

from heron.data.random_keys import normals, rng_keys, uniforms


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood 2014, on whole numbers of 64 bits, as in the authors' code."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 3, 2**40 + 1])
def test_they_are_splitmix64_s(seed: int) -> None:
    """A key is a hash of a hash of a hash; a number is its column's upper bits."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first number of seed 0
    rows, epochs = np.array([0, 1, 77, 2**33]), np.array([0, 5, 5, 9])
    keys = rng_keys(seed, epochs, rows)
    expected = [
        splitmix64((row + splitmix64((epoch + splitmix64(seed)) % 2**64)) % 2**64)
        for row, epoch in zip(rows.tolist(), epochs.tolist(), strict=True)
    ]
    assert [key % 2**64 for key in keys.tolist()] == expected
    drawn = uniforms(torch.from_numpy(keys), salt=4, count=3)
    for key, row in zip(expected, drawn.tolist(), strict=True):
        base = splitmix64((key + 4) % 2**64)
        columns = [splitmix64((base + n * 0x9E3779B97F4A7C15) % 2**64) >> 40 for n in range(3)]
        assert row == [column / 2**24 for column in columns]


def test_numbers_follow_the_row_not_its_place() -> None:
    rows = torch.arange(50)
    epoch = torch.zeros_like(rows)
    whole = uniforms(rng_keys(0, epoch, rows), 1, 4)
    some = torch.tensor([40, 3, 17])
    assert torch.equal(uniforms(rng_keys(0, epoch[some], some), 1, 4), whole[some])
    assert torch.equal(uniforms(rng_keys(0, epoch, rows), 1, 2), whole[:, :2])


def test_seed_epoch_row_salt_and_column_all_matter() -> None:
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    drawn = [
        uniforms(rng_keys(0, zero, zero), 0, 2)[0],
        uniforms(rng_keys(1, zero, zero), 0, 2)[0],
        uniforms(rng_keys(0, one, zero), 0, 2)[0],
        uniforms(rng_keys(0, zero, one), 0, 2)[0],
        uniforms(rng_keys(0, zero, zero), 1, 2)[0],
    ]
    values = torch.stack(drawn).flatten().tolist()
    assert len(set(values)) == len(values)


def test_they_are_uniform_and_uncorrelated() -> None:
    rows = torch.arange(200_000)
    drawn = uniforms(rng_keys(5, torch.full_like(rows, 3), rows), 2, 4)
    assert 0 <= drawn.min() < drawn.max() < 1
    share = torch.histc(drawn, 64, 0, 1) / drawn.numel() * 64
    assert (share - 1).abs().max() < 0.05
    assert (torch.corrcoef(drawn.T) - torch.eye(4)).abs().max() < 0.01
    assert abs(torch.corrcoef(torch.stack([drawn[:-1, 0], drawn[1:, 0]]))[0, 1]) < 0.01


def test_normals_are_normal_and_follow_their_rows() -> None:
    rows = torch.arange(20_000)
    drawn = normals(rng_keys(5, torch.zeros_like(rows), rows), 2, 3)
    assert drawn.isfinite().all()
    torch.testing.assert_close(drawn.mean(0), torch.zeros(3), rtol=0, atol=0.03)
    torch.testing.assert_close(torch.cov(drawn.T), torch.eye(3), rtol=0, atol=0.05)
    assert drawn.square().mean(0).sub(1).abs().max() < 0.05
    assert drawn.pow(4).mean(0).sub(3).abs().max() < 0.3
    turned = rows.flip(0)
    again = normals(rng_keys(5, torch.zeros_like(rows), turned), 2, 3)
    assert torch.equal(again.flip(0), drawn)
