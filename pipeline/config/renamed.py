"""Keys of the first edition: what they are called now."""

from typing import Any

from heron.pipeline.config.errors import ConfigError

# Key of the first edition: what it was where nobody had set it, which a run's config.yaml may
# hold; the new key.
RENAMED: dict[str, tuple[Any, str]] = {
    "data.canvas": (None, "data.decode_size"),
    "model.task_groups": (None, "objective.deepmtmv"),
    "model.label_autoencoder": (
        {"hidden": 512, "width": None},
        "objective.c2ae, with its keys hidden and code",
    ),
}


def move_renamed(tree: dict[str, Any]) -> None:
    """Renames the keys of the first edition in the configuration that a run has written.

    Args:
        tree: plain values, changed in place.
    """
    model, objective, data = (tree.get(name) or {} for name in ("model", "objective", "data"))
    if not all(isinstance(section, dict) for section in (model, objective, data)):
        return
    if "canvas" in data:
        data["decode_size"] = data.pop("canvas")
    if (groups := model.pop("task_groups", None)) is not None:
        objective["deepmtmv"] = groups
    if isinstance(autoencoder := model.get("label_autoencoder"), dict):
        del model["label_autoencoder"]
        if isinstance(objective.get("c2ae"), dict):
            code = {"hidden": autoencoder.get("hidden"), "code": autoencoder.get("width")}
            objective["c2ae"] |= code
    if isinstance(own := objective.get("custom"), dict):
        del objective["custom"]
        objective |= own


def refuse_renamed(tree: dict[str, Any]) -> None:
    """Takes keys of the first edition out of a configuration where they say nothing.

    Args:
        tree: plain values, changed in place.

    Raises:
        ConfigError: one of them says something; names the key that it is now.
    """
    for key, (default, now) in RENAMED.items():
        section, name = key.split(".")
        inside = tree.get(section)
        if isinstance(inside, dict) and name in inside:
            if (found := inside[name]) not in (default, None):
                raise ConfigError(f"{key} is {found}; this key is now {now}: move it there")
            del inside[name]
