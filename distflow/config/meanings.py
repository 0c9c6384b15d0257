"""What a key of another tool means here, as its dictionary says it, and the translations that dictionaries share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Unneeded(ValueError):
    """A value for which nothing needs to be written here; the text says why."""


class Meaning(NamedTuple):
    """What a key of another tool's configuration is here."""

    to: str = ""
    """A key of a recipe; empty if none stands for it."""
    text: str = ""
    """What is to be said of it: which value, or why there is no key."""
    make: Callable[[Any], Any] | None = None
    """Its value here, of its value there; None: the same. Raises ValueError, with the reason, for one without a
    counterpart, and `Unneeded` for one that needs none."""
    together: bool = False
    """The value here follows from several keys there."""
    options: Mapping[str, str] = {}
    """Of an engine's option, its name by engine; `to` is the section in which it stands."""


TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
OFF = "off here, too, unless it is written"
ALWAYS = "always so here"
NOTHING = "nothing stands for it, and none is needed: "
NOT_BUILT = "not built"
TURNS = (
    "a generate step of your own, which calls tools or an environment and generates turn by turn: "
    "flow.steps.sample.call=./file.py:NAME (docs/generate-steps.md)"
)
NO_DROPOUT = "adapters have no dropout: log-probs of a batch would differ from call to call"
NO_COLUMN = "functions get the column data_source, by that name: name the column so"
SHARDED = Meaning(text=NOTHING + "where a model or its optimizer lies is the backend's affair (docs/backends.md)")
SPEED = Meaning(text=NOTHING + "it changes speed, not results; options of engines: layout.pools.NAME.engine_options")
FOLDER = Meaning(text="on the command line: --runs-dir DIR")
_RESUMED = "on the command line: --run NAME --resume"


def _resumed(value: Any) -> Any:
    if value in (None, False, "disable"):
        raise Unneeded("nothing is needed: a run begins anew unless the command line says --resume")
    if value in (True, "auto", "latest"):
        raise Unneeded(_RESUMED)
    raise ValueError(f"{value}: checkpoints of other tools are not read; a run here goes on by --run NAME --resume")


RESUME = Meaning(text=_RESUMED, make=_resumed)
CUT = Meaning("flow.steps.update.with.clip", "[below, above]", together=True)
DUAL_CUT = Meaning("flow.steps.update.with.clip", "[below, above, dual]", together=True)
DIVERGENCE = Meaning("flow.steps.update.with.kl_coef", "with flow=grpo_kl; 0: flow=grpo", together=True)
LORA = Meaning("models.policy.lora", together=True)
SLEEPS = "with layout=colocated layout.pools.worker.offload=true: the engine leaves the GPU while the worker trains"


def one_of(**names: Any) -> Callable[[Any], Any]:
    """Translate names; `true` and `false` stand for these values."""

    def make(value: Any) -> Any:
        found = names.get(str(value).lower() if isinstance(value, bool) else str(value))
        if found is None:
            raise ValueError(f"{value} has no counterpart here; there are {', '.join(names)}")
        return found

    return make


TYPES = one_of(
    **{name: "bfloat16" for name in ("bfloat16", "bf16")},
    **{name: "float32" for name in ("float32", "fp32")},
    **{name: "float16" for name in ("float16", "fp16", "half")},
)


def option(make: Callable[[Any], Any] | None = None, *, together: bool = False, **names: str) -> Meaning:
    """Make the meaning of an option of engines, by the names that it has there."""
    text = "; ".join(f"{engine}: {name}" for engine, name in names.items())
    return Meaning("layout.pools.worker.engine_options", text, make, together, names)


def positive(value: Any) -> Any:
    """Take a number above 0; others switch something off."""
    if not isinstance(value, int | float | None):
        raise ValueError(f"{value} is no number")
    if value is None or value <= 0:
        raise Unneeded(f"{value} switches it off, as leaving it out does here")
    return value


def as_filter(value: Any) -> Any:
    """Translate `top_k`, of which null and -1 mean none."""
    return 0 if value in (None, -1) else value


def tracker_names(value: Any) -> list[str]:
    """Return the trackers that are here, of a name or a list of them."""
    return [name for name in (value if isinstance(value, list | tuple) else [value]) if name in TRACKERS]


def no_tracker(value: Any) -> bool:
    """Tell whether the value says that nothing is to be tracked, or only by what needs no tracker here."""
    names = value if isinstance(value, list | tuple) else [value]
    return all(name in (None, False, "", "none", "null", "None", "console", "file") for name in names)


def trackers(value: Any) -> Any:
    """Translate names of trackers."""
    known = tracker_names(value)
    if not known:
        raise Unneeded("none of them is a tracker here; metrics are always in the run's folder")
    return dict.fromkeys(known, True)


def true_as(text: str, then: Any) -> Callable[[Any], Any]:
    """Translate true to `then`; for false `text` says why nothing is written."""

    def make(value: Any) -> Any:
        if not value:
            raise Unneeded(text)
        return then

    return make


def unbuilt(what: str, *idle: Any) -> Meaning:
    """Make the meaning of what is not built here; `idle`: values with which it does nothing there either."""

    def make(value: Any) -> Any:
        if value is None or value in idle:
            raise Unneeded("nothing is needed: it does nothing with this value")
        raise ValueError(f"{NOT_BUILT}: {what}")

    return Meaning(text=f"{NOT_BUILT}: {what}", make=make)


def idle(what: str, *values: Any, why: str = "nothing is needed: it does nothing with this value") -> Meaning:
    """Make the meaning of what has to be decided by hand, with `what`, unless it has one of the idle values or none."""

    def make(value: Any) -> Any:
        if value is None or value in values:
            raise Unneeded(why)
        raise ValueError(what)

    return Meaning(text=what, make=make)
