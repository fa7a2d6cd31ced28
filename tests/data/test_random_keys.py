"""Counter-based random numbers: a function of what they are for, and uniform."""

import torch

from heron.pipeline.data.random_keys import normals, rng_keys, uniforms


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
