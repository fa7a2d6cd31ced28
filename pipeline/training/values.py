"""What a step says in numbers: over all processes, and refused where they are not finite."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from heron.pipeline.config.errors import TrainingError
from heron.pipeline.distributed import collectives
from heron.pipeline.distributed.exchange import nonfinite
from heron.pipeline.models.heterogeneous import Features
from heron.pipeline.training import checkpoint


def total(scalars: Mapping[str, Any], device: torch.device) -> dict[str, float]:
    """Returns the sums over processes of some scalars, tensors or numbers: one exchange."""
    stacked = torch.stack(
        [torch.as_tensor(x, device=device).detach().double() for x in scalars.values()]
    )
    return dict(zip(scalars, collectives.sum_over_processes(stacked).tolist(), strict=True))


def refuse_nonfinite(
    values: Mapping[str, float], step: int, saved: Path, features: Features
) -> None:
    """Stops before a NaN reaches the weights; all processes see the same values."""
    wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
    if wrong:
        named = [name for name in wrong if name != "loss"] or ["loss"]
        checkpoints = checkpoint.complete(saved)
        where = nonfinite(features) or ["the embeddings of all ranks are finite"]
        raise TrainingError(
            f"step {step}: {', '.join(f'{name} is {wrong[name]}' for name in named)}; "
            f"{'; '.join(where)}; the weights were not touched; last checkpoint: "
            f"{checkpoints[-1] if checkpoints else 'none'}; lower optim.lr or raise tau, "
            "and check the data with `heron shards verify`"
        )
