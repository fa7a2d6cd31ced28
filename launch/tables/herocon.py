"""HeroCon's tables: Scene, N-MNIST, XRMB and CelebA."""

from launch.tables.table import Method, Table

_L_U = "objective.weighted_unsupervised.weight"
_L_S = "objective.weighted_supervised.weight"


def _options(term: str, weight: float) -> tuple[str, ...]:
    """A baseline's one term, at the weight that HeroCon's like term has there, and its tau = 1."""
    return f"objective.{term}.weight={weight}", f"objective.{term}.tau=1.0"


# LARS, whose steps are shares of the weights, hardly moves a decoder of codes as small as
# X^T X = I makes them.
_C2AE = ("optim={kind: adam, lr: 0.001}",)


def _mib(weight: float) -> tuple[str, ...]:
    return (f"objective.mib.weight={weight}",)


def _scene() -> Table:
    return Table(
        config="scene.yaml",
        runs=5,
        source="HeroCon (KDD 2022), Table 2, Scene",
        data="download scene (Mulan's multi-label data sets) and run: heron shards build mulan "
        "--arff scene-train.arff scene-test.arff --xml scene.xml --out data/scene",
        methods={
            "DNN": Method("dnn", ((0.5902, 0.0122), (0.8647, 0.0077))),
            "Info-NCE": Method(
                "infonce", ((0.6144, 0.0072), (0.8783, 0.0110)), _options("nt_xent", 0.7)
            ),
            "CMC": Method("cmc", overrides=_options("cmc", 0.7)),
            "SupCon": Method(
                "supcon", ((0.5969, 0.0207), (0.8624, 0.0148)), _options("supcon", 0.02)
            ),
            "MIB": Method("mib", ((0.6151, 0.0147), (0.8759, 0.0114)), _mib(0.7)),
            "C2AE": Method(
                "c2ae",
                ((0.6145, 0.0275), (0.8834, 0.0105)),
                (*_C2AE, "model.encoder.dropout=0.5"),
            ),
            "DeepMTMV": Method("deepmtmv", ((0.6173, 0.0200), (0.8727, 0.0113))),
            "HCL": Method(
                "hcl",
                ((0.6413, 0.0193), (0.8205, None)),
                _options("input_weighted_unsupervised", 0.7),
            ),
            "HeroCon-s": Method(
                "herocon-s", ((0.6104, 0.0166), (0.8807, 0.0117)), (f"{_L_S}=0.01",)
            ),
            "HeroCon-u": Method(
                "herocon-u", ((0.6231, 0.0181), (0.8831, 0.0118)), (f"{_L_U}=0.3",)
            ),
            "HeroCon": Method("herocon", ((0.6366, 0.0141), (0.8878, 0.0079))),
        },
    )


def _nmnist() -> Table:
    return Table(
        config="nmnist.yaml",
        runs=3,
        source="HeroCon (KDD 2022), Table 2, N-MNIST",
        data="download MNIST's four idx files into a folder and run: heron shards build idx "
        "--folder mnist --view-kind noise --noise-std 0.0949 --out data/nmnist",
        methods={
            "DNN": Method("dnn", ((0.9036, 0.0045), (0.9463, 0.0025))),
            "Info-NCE": Method(
                "infonce", ((0.8877, 0.0064), (0.8900, 0.0067)), _options("nt_xent", 0.1)
            ),
            "CMC": Method("cmc", overrides=_options("cmc", 0.1)),
            "SupCon": Method("supcon", ((0.9265, 0.0040), (0.9584, 0.0037)), _options("supcon", 1)),
            "MIB": Method("mib", ((0.8920, 0.0117), (0.8051, 0.0086)), _mib(0.1)),
            "C2AE": Method("c2ae", ((0.9049, 0.0104), (0.9120, 0.0099)), _C2AE),
            "DeepMTMV": Method("deepmtmv", ((0.9051, 0.0043), (0.9474, 0.0023))),
            "HeroCon-s": Method("herocon-s", ((0.9265, 0.0040), (0.9584, 0.0037)), (f"{_L_S}=2",)),
            "HeroCon-u": Method(
                "herocon-u", ((0.9246, 0.0028), (0.9582, 0.0016)), (f"{_L_U}=0.1",)
            ),
            "HeroCon": Method("herocon", ((0.9363, 0.0019), (0.9705, 0.0012))),
        },
    )


def _xrmb() -> Table:
    return Table(
        config="xrmb.yaml",
        runs=5,
        source="HeroCon (KDD 2022), Table 3, XRMB",
        data="download XRMBf2KALDI_window7_single1.mat and its single2.mat (the X-ray microbeam "
        "data of Wang, Arora, Livescu and Bilmes 2015) and run, FILE being the name up to the "
        "digit: heron shards build xrmb --single1 FILE1.mat --single2 FILE2.mat --parts train "
        "--classes 20 --per-class 2500 --shuffle true --out data/xrmb",
        methods={
            "DNN": Method("dnn", ((0.5600, 0.0106), (0.9085, 0.0015))),
            "CMC": Method("cmc", ((0.6047, 0.0148), (0.9336, 0.0019)), _options("cmc", 0.1)),
            "SupCon": Method(
                "supcon", ((0.5938, 0.0153), (0.9207, 0.0062)), _options("supcon", 0.001)
            ),
            "MIB": Method("mib", ((0.5903, 0.0201), (0.9204, 0.0073)), _mib(0.1)),
            "C2AE": Method("c2ae", ((0.5850, 0.0161), (0.9178, 0.0065)), _C2AE),
            "DeepMTMV": Method("deepmtmv", ((0.5898, 0.0155), (0.9182, 0.0074))),
            "HeroCon-s": Method(
                "herocon-s", ((0.5938, 0.0153), (0.9207, 0.0062)), (f"{_L_S}=0.01",)
            ),
            "HeroCon-u": Method(
                "herocon-u", ((0.6169, 0.0128), (0.9442, 0.0012)), (f"{_L_U}=0.1",)
            ),
            "HeroCon": Method("herocon", ((0.6180, 0.0147), (0.9411, 0.0021))),
        },
    )


def _celeba() -> Table:
    return Table(
        config="celeba.yaml",
        runs=5,
        source="HeroCon (KDD 2022), Table 3, CelebA (49,500 pictures tested there)",
        data="download img_align_celeba.zip and list_attr_celeba.txt and run: heron shards build "
        "celeba --images img_align_celeba.zip --attributes list_attr_celeba.txt --merge true "
        "--out data/celeba",
        methods={
            "DNN": Method("dnn", ((0.5474, 0.0130), (0.7081, 0.0083))),
            "CMC": Method("cmc", ((0.5572, 0.0126), (0.7213, 0.0132)), _options("cmc", 0.05)),
            "SupCon": Method(
                "supcon", ((0.5527, 0.0085), (0.7166, 0.0088)), _options("supcon", 0.1)
            ),
            "MIB": Method("mib", ((0.5602, 0.0160), (0.7222, 0.0075)), _mib(0.05)),
            "C2AE": Method("c2ae", ((0.5726, 0.0125), (0.7319, 0.0203)), _C2AE),
            "DeepMTMV": Method(
                "deepmtmv",
                ((0.5621, 0.0098), (0.7264, 0.0169)),
                ("model.task_groups.widths=[256, 128]",),
            ),
            "HeroCon-s": Method(
                "herocon-s", ((0.5801, 0.0092), (0.7497, 0.0074)), (f"{_L_S}=0.1",)
            ),
            "HeroCon-u": Method(
                "herocon-u", ((0.5551, 0.0114), (0.7307, 0.0044)), (f"{_L_U}=0.01",)
            ),
            "HeroCon": Method("herocon", ((0.5907, 0.0121), (0.7544, 0.0138))),
        },
    )


TABLES = {"scene": _scene(), "nmnist": _nmnist(), "xrmb": _xrmb(), "celeba": _celeba()}
