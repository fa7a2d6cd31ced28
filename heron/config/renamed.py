"""Keys of the first edition of Heron that were renamed since."""

from typing import Any

from heron.config.errors import ConfigError

# For each key of the first edition: its default, which the config.yaml of a run may have, and the
# new key.
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
    if isinstance(custom_terms := objective.get("custom"), dict):
        del objective["custom"]
        objective |= custom_terms


def refuse_renamed(tree: dict[str, Any]) -> None:
    """Removes keys of the first edition that have their defaults from a configuration.

    Args:
        tree: plain values, changed in place.

    Raises:
        ConfigError: one of them has another value; names the new key.
    """
    for key, (default, new_key) in RENAMED.items():
        section, name = key.split(".")
        values = tree.get(section)
        if isinstance(values, dict) and name in values:
            if (value := values[name]) not in (default, None):
                raise ConfigError(f"{key} is {value}; this key is now {new_key}: move it there")
            del values[name]
