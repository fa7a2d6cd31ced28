"""Named axes are checked while the tests run; small tensors want one thread."""

import torch
from jaxtyping import install_import_hook

install_import_hook(["pipeline.objectives", "pipeline.data.views"], "beartype.beartype")
torch.set_num_threads(1)  # two wait for each other longer than they work, most of all under load
