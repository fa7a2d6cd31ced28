"""What a pair of rows costs, timed on the objective alone."""

import time

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from heron.launch.studies.step_model import Setting, Workload
from heron.pipeline.distributed.traffic import row_shapes
from heron.pipeline.objectives.batch import FeatureMap, GlobalBatch
from heron.pipeline.objectives.present import OwnRows

MANY = 16  # rows of the global batch, in shares of a process, at least
PAIRS = 2**22  # of rows, at least: fewer take no time that a clock can measure
TIMES = 3  # each is timed; the least counts, as nothing makes a step quicker than it is
SET = 0.2  # of the labels, where a row has several


def time_pair(workload: Workload, setting: Setting) -> float:
    """Returns the seconds of one anchor against one row of the global batch, both ways.

    The objective of a process is timed on random vectors with two sizes of the global batch, one
    four times the other: what it takes more is of the pairs that it has more. As large a part of
    the rows is labelled as in the setting, with one label each, or under `bce` a fifth of all.
    On a CPU it is the processor's time over the threads, which no other work lengthens.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(workload.config.train.cpu_threads or threads)
    share = setting.share
    many = max(MANY * share, PAIRS // share)
    least = []
    try:
        for rows in (many // 4, many):
            taken = []
            for seed in range(TIMES):
                batch = _batch(workload, setting, rows, seed, device)
                started = _clock(device)
                loss, _ = workload.objective(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                taken.append(_clock(device) - started)
            least.append(min(taken))
    finally:
        torch.set_num_threads(threads)
    return max(0.0, (least[1] - least[0]) / (share * (many - many // 4)))


def _clock(device: torch.device) -> float:
    """Returns the time in seconds when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def _batch(
    workload: Workload, setting: Setting, rows: int, seed: int, device: torch.device
) -> GlobalBatch:
    """Returns a global batch of random vectors whose first rows are the process's own."""
    draw = torch.Generator().manual_seed(seed)
    objective = workload.objective
    share, part = setting.share, setting.labelled / setting.rows
    own, labelled = round(part * share), round(part * rows)
    if "bce" in objective.terms:
        targets = (torch.rand(labelled, workload.labels, generator=draw) < SET).float()
    else:
        classes = torch.randint(workload.labels, (labelled,), generator=draw)
        targets = one_hot(classes, workload.labels).float()
    paths = torch.randint(2, (labelled, max(1, workload.levels)), generator=draw)
    shapes = row_shapes(workload.model, workload.shapes, workload.labels)

    def leaves(name: str, count: int) -> list[Tensor]:
        if name == "paths":
            return [paths.to(device)]
        drawn = [torch.randn(count, *shape, generator=draw).to(device) for shape in shapes[name]]
        return drawn if name == "inputs" else [x.requires_grad_() for x in drawn]

    def scope(asked: str, count: int) -> FeatureMap:
        names = getattr(objective.needs, asked)
        return FeatureMap(asked, {name: leaves(name, count) for name in names})

    def told(own: slice, count: int) -> OwnRows:  # others' numbers are ones: none is waited for
        return OwnRows(own, lambda x: x.new_ones(count, *x.shape[1:]))

    own_rows = slice(0, share)
    return GlobalBatch(
        own=scope("own", share),
        gathered=scope("gathered", rows),
        gathered_labelled=scope("labelled", labelled),
        vectors=scope("vectors", rows),
        labelled_vectors=scope("labelled_vectors", labelled),
        shared=(told(own_rows, rows), told(slice(0, own), labelled)) if share < rows else None,
        targets=targets.to(device),
        rows=own_rows,
        labelled=slice(0, own),
        labelled_at=torch.arange(labelled, device=device),
        inputs=[],
        indices=torch.arange(share, device=device),
        rng_keys=torch.arange(share, device=device),
        epoch=1.0,
        gather_labelled=lambda x: x,
    )
