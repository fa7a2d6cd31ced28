"""MulCo's tables: UCI sets and KMNIST."""

from collections.abc import Mapping
from dataclasses import replace

from launch.tables.table import Figure, Method, Table

ACCURACY = {"accuracy": "accuracy"}
# Accuracy in per cent over the trials of a method, a column each set.
UCI: dict[str, tuple[Figure, ...]] = {  # Table 3: Yeast, Texture, Dermatology
    "UB-EXP": ((56.6, 1.47), (93.62, 0.37), (95.49, 3.37)),
    "UB-LOG": ((57.64, 1.91), (93.62, 0.92), (97.3, 2.21)),
    "MSE": ((58.17, 1.84), (92.71, 0.49), (94.59, 2.21)),
    "GCE": ((57.29, 0.62), (90.1, 1.33), (95.5, 2.55)),
    "L-UW": ((57.65, 1.86), (93.75, 0.55), (95.49, 3.37)),
    "MLCL": ((56.07, 1.46), (93.75, 0.32), (95.49, 3.37)),
    "PiCO": ((52.9, 1.2), (93.15, 0.21), (98.44, 1.27)),
    "ComCo": ((36.12, 11.99), (67.71, 3.59), (97.3, 2.21)),
    "PLNL": ((44.97, 0.55), (26.51, 3.97), (79.28, 4.59)),
    "MulCo debiased": ((56.79, 1.12), (94.34, 1.17), (97.92, 1.95)),
    "MulCo sifted": ((57.2, 1.47), (94.64, 1.26), (97.92, 0.74)),
    "MulCo soft": ((56.79, 1.12), (94.49, 1.05), (98.44, 1.27)),
    "MulCo weighted": ((56.16, 2.0), (94.2, 0.63), (97.92, 0.74)),
}
KMNIST: dict[str, tuple[Figure | None, ...]] = {  # Table 2: s = 2, 3, 4, 5
    "UB-EXP": ((58.33, 1.39), (60.45, 0.49), (61.51, 0.3), (61.94, 0.24)),
    "UB-LOG": ((59.36, 1.0), (61.53, 1.05), (64.24, 0.56), (66.47, 0.69)),
    "MSE": ((54.39, 5.15), (63.07, 0.49), (66.59, 0.55), (69.17, 0.46)),
    "GCE": ((53.14, 6.64), (60.94, 0.93), (65.01, 0.5), (68.16, 0.33)),
    "L-UW": ((55.14, 1.64), (58.31, 0.26), (60.53, 0.19), (61.78, 0.15)),
    "MLCL": ((45.32, 2.19), (50.52, 0.61), (54.41, 1.29), (55.13, 2.24)),
    "PiCO": ((51.59, 0.65), (54.25, 0.46), (58.75, 0.53), (59.77, 0.39)),
    "ComCo": (None, None, None, None),
    "PLNL": (None, None, None, None),
    "MulCo debiased": ((51.69, 1.49), (54.25, 1.14), (57.13, 1.31), (58.39, 1.25)),
    "MulCo sifted": ((62.63, 0.77), (66.05, 1.43), (68.78, 1.39), (70.56, 0.76)),
    "MulCo soft": ((62.69, 0.85), (65.97, 1.47), (68.83, 1.43), (70.59, 0.82)),
    "MulCo weighted": ((62.67, 0.82), (66.07, 1.47), (68.81, 1.4), (70.55, 0.74)),
}
# PiCO's phi goes down over the run. ComCo's neighbours are positives in its last half, which is
# its 100 epochs in runs of 200. PLNL has its two times 200 epochs in one run, of which the first
# half is SCL-LOG alone.
SCHEDULES = {
    "PiCO": {"objective.pico.phi_epochs": (1.0, 1)},
    "ComCo": {"objective.comco.neighbour_epochs": (0.5, 1)},
    "PLNL": {
        "objective.plnl.pretrain_epochs": (0.5, 1),
        "objective.plnl.warmup_epochs": (0.05, 3),
        "objective.plnl.consistency_epochs": (0.25, 1),
    },
}
QUEUES = {  # MulCo's of the experiment
    "PiCO": ("objective.pico.queue=1024",),
    "ComCo": ("objective.comco.queue=1024",),
}
NEIGHBOURS = {"PLNL": ("objective.plnl.neighbours=50",)}  # its 500 are all rows of Dermatology


def _mulco(
    config: str,
    source: str,
    data: str,
    figures: Mapping[str, Figure | None],
    special: Mapping[str, tuple[str, ...]],
) -> Table:
    """A table of MulCo: accuracy in per cent as published, one figure a method.

    `special` has overrides of a method by its name, and under "" those of all.
    """
    names = {
        "UB-EXP": "ub-exp",
        "UB-LOG": "ub-log",
        "MSE": "mse",
        "GCE": "gce",
        "L-UW": "l-uw",
        "MLCL": "mlcl",
        "PiCO": "pico",
        "ComCo": "comco",
        "PLNL": "plnl",
        "MulCo standard": "mulco-standard",
        "MulCo debiased": "mulco-debiased",
        "MulCo sifted": "mulco-sifted",
        "MulCo soft": "mulco-soft",
        "MulCo weighted": "mulco-weighted",
    }
    methods = {}
    for shown, name in names.items():
        figure = figures.get(shown)
        scaled = None
        if figure is not None:
            scaled = (figure[0] / 100, None if figure[1] is None else figure[1] / 100)
        own = special.get("", ()) + QUEUES.get(shown, ()) + special.get(shown, ())
        methods[shown] = Method(name, (scaled,), own, SCHEDULES.get(shown, {}))
    return Table(config, 5, source, data, methods, ACCURACY, seeded=True, headline="MulCo weighted")


def _uci(name: str, column: int, file: str) -> Table:
    table = _mulco(
        f"{name}.yaml",
        f"MulCo (TKDD 2026), Table 3, {name.capitalize()}",
        f"download {name} (docs/results.md says where, and what to take out of the file) and run: "
        f"heron shards build table --csv {file} --out data/{name}",
        {method: figures[column] for method, figures in UCI.items()},
        NEIGHBOURS,
    )
    return replace(table, published_runs=3)


def _kmnist(sets: int) -> Table:
    table = _mulco(
        "kmnist.yaml",
        f"MulCo (TKDD 2026), Table 2, KMNIST, s = {sets}",
        "download KMNIST's four idx files into a folder and run: heron shards build idx --folder "
        "kmnist --out data/kmnist",
        {method: figures[sets - 2] for method, figures in KMNIST.items()},
        {"": (f"data.protocol.complementary={sets}",)},
    )
    return replace(table, runs=2)


TABLES = {
    "yeast": _uci("yeast", 0, "yeast.csv"),
    "texture": _uci("texture", 1, "texture.dat"),
    "dermatology": _uci("dermatology", 2, "dermatology.csv --missing mean"),
    **{f"kmnist{sets}": _kmnist(sets) for sets in (2, 3, 4, 5)},
}
