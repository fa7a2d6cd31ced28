"""The cost of a pair of rows, timed on the objective alone."""

import time

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from heron.distributed.traffic import row_shapes
from heron.objectives.batch import FeatureMap, GlobalBatch
from heron.objectives.present import OwnRows
from heron.studies.step_model import Setting, Workload

MIN_SHARES = 16  # rows of the global batch, as a multiple of a process's
MIN_PAIRS = 2**22  # of rows: fewer take too little time for a clock
REPEATS = 3  # of each measurement; the minimum counts, as noise only ever adds time
LABEL_RATE = 0.2  # share of labels that are set, where a row has several


def time_pair(workload: Workload, setting: Setting) -> float:
    """Returns the seconds of one anchor against one row of the global batch, forward and backward.

    Times a process's objective on random vectors at two sizes of the global batch, one four times
    the other, and divides the difference in time by the difference in pairs. The share of rows
    that is labelled is the setting's; each has one label, or under `bce` a fifth of all labels. On
    a CPU the time is processor time divided by the threads, which other work does not lengthen.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(workload.config.train.cpu_threads or threads)
    local_rows = setting.local_rows
    large_batch = max(MIN_SHARES * local_rows, MIN_PAIRS // local_rows)
    minima = []
    try:
        for rows in (large_batch // 4, large_batch):
            times = []
            for seed in range(REPEATS):
                batch = _batch(workload, setting, rows, seed, device)
                started = _clock(device)
                loss, _ = workload.objective(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                times.append(_clock(device) - started)
            minima.append(min(times))
    finally:
        torch.set_num_threads(threads)
    return max(0.0, (minima[1] - minima[0]) / (local_rows * (large_batch - large_batch // 4)))


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def _batch(
    workload: Workload, setting: Setting, rows: int, seed: int, device: torch.device
) -> GlobalBatch:
    """Returns a global batch of random vectors whose first rows are the process's own."""
    generator = torch.Generator().manual_seed(seed)
    objective = workload.objective
    local_rows, labelled_share = setting.local_rows, setting.labelled / setting.rows
    own_labelled, labelled = round(labelled_share * local_rows), round(labelled_share * rows)
    if "bce" in objective.terms:
        targets = (torch.rand(labelled, workload.labels, generator=generator) < LABEL_RATE).float()
    else:
        classes = torch.randint(workload.labels, (labelled,), generator=generator)
        targets = one_hot(classes, workload.labels).float()
    paths = torch.randint(2, (labelled, max(1, workload.levels)), generator=generator)
    shapes = row_shapes(workload.model, workload.shapes, workload.labels)

    def feature_tensors(name: str, count: int) -> list[Tensor]:
        if name == "paths":
            return [paths.to(device)]
        draws = (torch.randn(count, *shape, generator=generator) for shape in shapes[name])
        tensors = [x.to(device) for x in draws]
        return tensors if name == "inputs" else [x.requires_grad_() for x in tensors]

    def feature_map(scope: str, count: int) -> FeatureMap:
        names = getattr(objective.needs, scope)
        return FeatureMap(scope, {name: feature_tensors(name, count) for name in names})

    def own_among(rows: slice, count: int) -> OwnRows:  # ones stand for other processes' numbers
        return OwnRows(rows, lambda x: x.new_ones(count, *x.shape[1:]))

    own_rows, own_labelled_rows = slice(0, local_rows), slice(0, own_labelled)
    shared = own_among(own_rows, rows), own_among(own_labelled_rows, labelled)
    return GlobalBatch(
        own=feature_map("own", local_rows),
        gathered=feature_map("gathered", rows),
        gathered_labelled=feature_map("labelled", labelled),
        vectors=feature_map("vectors", rows),
        labelled_vectors=feature_map("labelled_vectors", labelled),
        own_row_sets=shared if local_rows < rows else None,
        targets=targets.to(device),
        rows=own_rows,
        labelled=own_labelled_rows,
        labelled_indices=torch.arange(labelled, device=device),
        inputs=[],
        indices=torch.arange(local_rows, device=device),
        rng_keys=torch.arange(local_rows, device=device),
        epoch=1.0,
        gather_labelled=lambda x: x,
    )
