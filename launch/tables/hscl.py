"""H-SCL's table: CIFAR-10."""

from launch.tables.table import Method, Table


def _cifar10() -> Table:
    figures = {
        "UCL": ("ucl", 0.8916),
        "H-UCL": ("h-ucl", 0.9035),
        "SCL": ("scl", 0.9346),
        "H-SCL(beta)": ("h-scl-beta", 0.9398),
        "H-SCL(tau)": ("h-scl-tau", 0.9295),
    }
    return Table(
        config="cifar10.yaml",
        runs=1,
        source="H-SCL, Table I, CIFAR-10, a linear probe (ResNet-50 and 200 epochs there)",
        data="download CIFAR-10 as JPEG files, train/CLASS/*.jpg and test/CLASS/*.jpg (for its "
        "archive see heron shards build cifar --help), and run: "
        "heron shards build folder --folder cifar10 --out data/cifar10",
        methods={k: Method(name, ((mean, None),)) for k, (name, mean) in figures.items()},
        scores={"accuracy": "accuracy"},
        published_runs=1,
        seeded=True,
        headline="H-SCL(beta)",
    )


TABLES = {"cifar10": _cifar10()}
