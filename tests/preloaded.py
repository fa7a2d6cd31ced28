"""What the server that `ranks` and `forked` fork from has loaded: what else each would load anew.

A process would spend more seconds on these than on most tests: three on what DeepSpeed's ZeRO
loads when it is first asked for, one on the objectives and on the first report.
"""

from contextlib import suppress
from importlib import import_module

from heron.losses.named_terms import named_terms
from heron.report import pages
from heron.training import launch

LATER = ["matplotlib.figure", "matplotlib.backends.backend_agg", "webdataset"]
LATER += ["sklearn.linear_model", "sklearn.decomposition", "torch.utils.tensorboard"]
LATER += ["plotly.graph_objects", "transformers.modeling_utils", "torch._inductor.compile_fx"]
LATER += ["deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"]
LATER += ["deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.superoffload"]
LATER += ["accelerate.commands.launch", "torch.testing", "pytest", "setuptools"]
OWN = ["heron.api.job", "heron.cli.main", "heron.retrieval.query"]
OWN += ["tests.experiments", "tests.forked", "tests.ranks"]

for name in LATER:
    with suppress(ImportError):  # of a library that is not installed: what needs it will say so
        import_module(name)
for name in OWN:
    import_module(name)
with suppress(ImportError):  # where DeepSpeed is not installed
    import_module("heron.training.zero")
vars(launch)["cores_per_process"] = lambda: 1  # as in the tests' own process: see `conftest`
named_terms()  # loads every objective
for name in ("base.html", "run.html"):
    pages._environment(pages.PAGE).get_template(name)
pages._plotly()
