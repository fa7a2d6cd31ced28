"""Named axes are checked while the tests run."""

from jaxtyping import install_import_hook

install_import_hook(["pipeline.objectives", "pipeline.data.views"], "beartype.beartype")
