"""Whether weights can take the link that a recipe names (`weights.link`)."""

from __future__ import annotations

from distflow.config.schema import Recipe
from distflow.errors import Problems
from distflow.flow.structure import Structure

_KEY = "weights.link"


def check_weight_link(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse a link where nobody would get weights by it, and beside settings that it would break."""
    given, security = recipe.weights, recipe.security
    if given.link == "auto":
        return
    homes = {model: pool for pool in structure.pools for model in pool.homes}
    read = {
        (model, pool.name)
        for pool in structure.pools
        if not pool.validates
        for model in pool.generates
        if model in homes and homes[model] != pool
    }
    if not read:
        message = f"{given.link} needs engines in other processes than the training workers, and there are none"
        problems.add(_KEY, message, "auto, or layout=split")
    elif given.link == "collective" and all(homes[model].count < 2 for model, _ in read):
        pools = sorted({homes[model].name for model, _ in read})
        counts = " and ".join(f"layout.pools.{name}.count" for name in pools)
        message = "collective is for several training workers, of which each sends a part, and there is one"
        problems.add(_KEY, message, f"auto, or {counts}=2 or more", others=tuple(counts.split(" and ")))
    if given.link == "collective" and given.encoding in ("bf16", "fp8"):
        message = f"collective sends what was trained, and weights.encoding is {given.encoding}"
        problems.add(_KEY, message, "auto, or weights.encoding=auto", others=("weights.encoding",))
    if security.encrypt == "all" and not security.trusted_network:
        message = f"{given.link} does not encrypt weights, and security.encrypt is all"
        hint = "auto, or security.trusted_network=true if no one else has access to the network"
        problems.add(_KEY, message, hint, others=("security.encrypt",))
