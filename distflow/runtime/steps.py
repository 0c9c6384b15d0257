"""The steps that a worker runs, and the context that each is handed.

`StepRunner` is the boundary to the user's code. An exception raised there is reported with the user's own frames first,
and a standard field of the wrong shape is reported by the step that wrote it, not by the one that reads it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import iscoroutinefunction, signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.comm.users_code import UsersCode
from distflow.data.batch import Batch, join, whole, with_same_parts
from distflow.data.fields import changed, complaint, with_fields
from distflow.data.prefixes import own_fields, with_own
from distflow.data.randomness import generator
from distflow.data.samples import (
    in_loss_again,
    last_rows,
    on_all_rows,
    out_of_loss,
    unrewarded_where_failed,
    untrained_where_left_out,
)
from distflow.errors import DistflowError, StepError, UserError, device_fault, loop_cure
from distflow.exchange.tally import Tally
from distflow.flow.imported_step import check_step
from distflow.flow.plan import StepPlan
from distflow.flow.resolve import resolve
from distflow.flow.step import ATTRIBUTE, of_runtime
from distflow.flow.user_frames import frames_of, log_whole
from distflow.log import logger
from distflow.runtime.attempt import ATTEMPT, RequestRefused, innermost
from distflow.runtime.episode_loop import ALONE, Begin, Episodes, SetupFailed, StepSetup
from distflow.runtime.generate_step import GenerateStep, GivenSampling
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import Backend, Engine, Tokenizer, packs
from distflow.runtime.sample_errors import EpisodeErrors, EpisodeFailed, ErrorPolicy
from distflow.runtime.trace_writer import spanned
from distflow.types import (
    A_TOKEN,
    DROP_REASON,
    LEFT_OUT,
    SEQUENCE,
    VALIDATION,
    Episode,
    LeaseKind,
    Uid,
    lease_kind,
    written,
)

log = logger(__name__)


@dataclass(slots=True)
class StepContext:
    """What a step function may ask of its worker. A plain object: build one by hand to test a step of your own."""

    step_name: str
    worker: str = "worker/0"
    training_step: int = 0
    """Counted from 0, as everywhere in scripts; files say step = training_step + 1."""
    training_steps: int = 0
    """How many the run has."""
    policy_version: int = 0
    update_epoch: int = 0
    """How often this training step's samples have been trained on before (with batch.epochs)."""
    rests: bool = False
    """The step's model is not updated now: during batch.critic_warmup, or after batch.target_kl has been passed."""
    moved: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of a policy's updates in this epoch: the sum of r - 1 - log r over tokens, and their number."""
    seed: int = 0
    samples_per_prompt: int = 1
    ledgers: int = 1
    """Prompt positions are dealt to so many ledgers in turn."""
    tokens_per_microbatch: int = 0
    """Budget of tokens of one forward and backward, as the step's model computes them; 0: no limit. It falls where the
    memory does not suffice."""
    masks_truncated: bool = False
    """`batch.mask_truncated` is loss: where a model is trained, no token of responses that were cut off is."""
    has_baseline: bool = False
    """The flow compares samples with one of their group that is not trained on: a step writes `baseline`."""
    temperature: float = 1.0
    """Temperature at which the flow's generate step samples."""
    metrics: MetricStore = field(default_factory=MetricStore)
    state: dict[str, Any] = field(default_factory=dict)
    """Plain values kept here are saved in checkpoints."""
    shared: Any = field(init=False, repr=False, compare=False)
    """What the `setup` of a generate step has given to all its episodes here; raises UserError without one."""
    tally: Tally = field(default_factory=Tally)
    """Samples that this step has judged, and on how many it failed, here and on all workers that run it."""
    models: Mapping[str, Backend] = field(default_factory=dict)
    model: str | None = None
    """The step's `model:` key."""
    prefix: str = ""
    """What the names of the fields that it sees begin with in the whole batch: those of a further model's samples."""
    reads: tuple[str, ...] = ()
    """The fields that the step reads, with those that functions chosen by its settings read."""
    engine: Engine | None = None
    tokenizer: Tokenizer | None = None
    dtype: str = "float32"
    """Type of the model that generates; log-probs are kept in float64 for float64 models."""
    replica: int = 0
    """Number of this training replica, from 0."""
    gather: Callable[[Tensor], list[Tensor]] | None = lambda tensor: [tensor]
    """Gathers over the replicas in steps of batch scope; None in other steps. Use `all_gather` and `all_reduce`."""
    denominators: dict[str, float] = field(default_factory=dict)
    """What `update` has accumulated since the last apply, by model; gradients are divided by the sum over replicas."""
    fixed_denominators: dict[str, float] = field(default_factory=dict)
    """Used instead for sums that are divided by a constant, the same on every replica."""

    @property
    def backend(self) -> Backend:
        """The backend of this step's model; raises LookupError if this worker does not hold it."""
        if self.model is None or self.model not in self.models:
            raise LookupError(f"step {self.step_name!r} asked for model {self.model!r}; here are {sorted(self.models)}")
        return self.models[self.model]

    def __getattr__(self, name: str) -> Any:
        """Say what is missing, which is `shared` unless it was given."""
        if name != "shared":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        raise UserError(
            f"ctx.shared: step {self.step_name!r} has no `setup` that has given anything to its episodes — write an "
            'async context manager over ctx that yields it, and declare it: @step(role="generate", …, setup=clients) '
            "with\n@asynccontextmanager\nasync def clients(ctx):\n    async with httpx.AsyncClient() as client:\n"
            "        yield client"
        )

    @property
    def packs(self) -> bool:
        """Tell whether the step's model packs, so that its budget counts a shared prompt once, and no padding."""
        return packs(self.backend)

    def report_moved(self, divergence: float, tokens: float) -> None:
        """Tell how far a policy is from where the training step found it: the sum of r - 1 - log r over so many tokens.

        A step that trains the policy calls it for each micro-batch; `batch.target_kl` goes by it.
        """
        self.moved[0] += divergence
        self.moved[1] += tokens

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens with which a response should stop: the tokenizer's end token, and those of the model's generation
        configuration; empty if there are none."""
        assert self.tokenizer is not None, "a worker with a generate step has a tokenizer"
        return self.tokenizer.end_tokens

    def rng(self, uid: Uid, sample: int = 0) -> np.random.Generator:
        """A generator that depends only on the run's seed, this step and the sample, never on the worker."""
        return generator(self.seed, f"step:{self.step_name}", uid.position, sample)

    def once(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Ask a tool, in a generate step: `await ctx.once("order", shop.order, 3)`; without `await` in a plain `def`.

        What `function(*args, **kwargs)` returns, or what comes of awaiting that, is recorded with the sample, and a
        sample that is played again elsewhere gets it from there. Returns it as it comes from the record: tuples are
        lists. A plain function that an `async def` step gives runs in a thread. Raises TypeError for what is no plain
        value, ValueError for more than 16 KiB, or 64 KiB in a sample, UserError where no episode is under way.
        """
        attempt = ATTEMPT.get(None)
        if attempt is None:
            raise UserError(
                f"ctx.once({name!r}): step {self.step_name!r} makes no episode, of whose record the answer would be a "
                "part: it is for generate steps, as a run or `distflow test-plugin` calls them"
            )
        return attempt.once(name, function, args, kwargs)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all training replicas, in their order: for small tensors, in steps of batch scope.

        Every replica calls it once a training step for each call of any other. Raises UserError in other steps.
        """
        if self.gather is None:
            raise UserError(
                f"step {self.step_name!r} gathers a tensor over all replicas, but they call it at different times: "
                'give it to the training pool and declare it with scope="batch"'
            )
        return self.gather(tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all training replicas, the same to the last bit on each; see `all_gather`."""
        first, *others = self.all_gather(tensor)
        return sum(others, start=first)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time spent inside to metric `timing_s/<name>` (seconds per training step)."""
        with self.metrics.timed(f"timing_s/{name}"):
            yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Show the time spent inside as a span of the trace (`distflow trace`), without a metric of its own."""
        with spanned(self.metrics.trace, name, "user"):
            yield


class EpisodeContext(StepContext):
    """The context of a generate step in the process of its episodes: what the worker has is not there."""

    @property
    def state(self) -> dict[str, Any]:
        """Raises UserError."""
        raise self._elsewhere("state")

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        """Take the empty one of every new context; raises UserError for another, which would be lost."""
        if value:
            raise self._elsewhere("state")

    @property
    def engine(self) -> Engine | None:
        """Raises UserError."""
        raise self._elsewhere("engine")

    @engine.setter
    def engine(self, value: Engine | None) -> None:
        """Take the None of every new context; raises UserError for another."""
        if value is not None:
            raise self._elsewhere("engine")

    def _elsewhere(self, what: str) -> UserError:
        return UserError(
            f"ctx.{what}: the episodes of step {self.step_name!r} run in a process of their own, and the worker that "
            f"has it is another one — layout.pools.{self.worker.split('/')[0]}.environments=thread"
        )


class ServedContext(StepContext):
    """The context of a step that runs for other workers: nothing may be kept between two calls."""

    @property
    def state(self) -> dict[str, Any]:
        """Raises UserError."""
        raise self._unkept()

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        """Take the empty one of every new context; raises UserError for another, which would be lost."""
        if value:
            raise self._unkept()

    def _unkept(self) -> UserError:
        return UserError(
            f"ctx.state: step {self.step_name!r} runs on {self.worker} for other workers, so that a batch may be "
            "computed anywhere, and twice — write a function of the batch alone, or let the pool that has the samples "
            "run it (`roles`, `steps` of layout.pools)"
        )


SHOWN_UIDS = 4


class StepRunner:
    """The steps of one worker, by name. Raises PluginError for one that cannot be imported or does not fit."""

    def __init__(
        self,
        worker: str,
        steps: Sequence[StepPlan],
        contexts: Mapping[str, StepContext],
        of_validation: MetricStore | None = None,
        loop: Episodes | None = None,
    ) -> None:
        self._worker = worker
        self._plans = {step.name: step.as_it_sees() for step in steps}
        """With their fields by the names that they know them by."""
        self._contexts = contexts
        self._functions: dict[str, Callable[..., Any]] = {}
        self._loop: Episodes = loop or ALONE
        """Where generate steps run."""
        self._of_validation = MetricStore() if of_validation is None else of_validation
        """Gets what steps measure on samples of validation; those that are generated have metrics of their owner's."""
        self._told: set[tuple[str, str]] = set()
        """Fields that steps wrote without a declaration, and that were told."""
        for step in steps:
            function = resolve(step.call)
            check_step(function, step)
            self._functions[step.name] = function

    def call(self, name: str, batch: Batch) -> Batch:
        """Run a step over a batch; raises StepError with the user's frames first, UserError for wrong settings."""
        kinds = by_kind(batch)
        if "val" not in kinds:
            return self._call(name, batch)
        context = self._contexts[name]
        measured, context.metrics = context.metrics, self._of_validation
        try:
            validated = self._call(name, batch.select(kinds["val"]))
        finally:
            context.metrics = measured
        if "train" not in kinds:
            return validated
        both = [whole(self._call(name, batch.select(kinds["train"]))), whole(validated)]
        joined = join(with_same_parts(both))
        return joined.select(torch.tensor([*kinds["train"], *kinds["val"]]).argsort())

    def _call(self, name: str, batch: Batch) -> Batch:
        plan, context = self._plans[name], self._contexts[name]
        seen = own_fields(batch, plan.prefix)
        masks = context.masks_truncated and plan.role == "train" and plan.model is not None
        if masks:
            seen = out_of_loss(seen)
        # What it writes belongs to the samples, unless it looks at their sequences itself.
        given = last_rows(seen) if plan.role == "score" and SEQUENCE not in plan.reads else seen
        with self._reported(plan, batch), context.metrics.timed(f"timing_s/{name}", plan.role):
            result = self._functions[name](given, context, **plan.settings)
        checked = self._checked(plan, given, result)
        if given is not seen:
            self._check_of_samples(plan, given, checked)
        whole = with_own(batch, seen, on_all_rows(seen, given, checked), plan.prefix)
        if plan.role == "score":
            whole = unrewarded_where_failed(whole)
        return untrained_where_left_out(in_loss_again(whole, batch) if masks else whole)

    def generate_step(self, name: str, of_validation: Mapping[str, Any] | None = None) -> GenerateStep:
        """A step of role generate. `of_validation`: its settings for prompts of validation."""
        plan = self._plans[name]
        context, function = self._contexts[plan.name], self._functions[plan.name]
        validating = plan.settings if of_validation is None else of_validation
        settings: dict[LeaseKind, Mapping[str, Any]] = {"train": plan.settings, "val": validating}
        parameters = signature(function).parameters
        others = of_runtime(parameters)
        own: dict[LeaseKind, Mapping[str, Any]] = {
            kind: {name: value for name, value in given.items() if name not in others}
            for kind, given in settings.items()
        }
        sampling = {kind: GivenSampling.of(given, parameters) for kind, given in settings.items()}
        policies = {kind: ErrorPolicy.of(given) for kind, given in settings.items()}
        errors = EpisodeErrors(plan.name, policies, lambda: context.tally, context.metrics)

        def failed(error: BaseException, episode: Episode) -> Exception:
            if isinstance(error, SetupFailed | EpisodeFailed):
                return error
            if isinstance(error, RequestRefused):
                return EpisodeFailed(f"{self._where(plan)} {error}", error.did, error.did.split()[0], _place(error))
            found = self._raised(plan, error, f", with {_shown([tuple(episode.uid)], 1)} in hand")
            # Mistakes of settings and declarations, and what is wrong with the worker or its GPU, are no accidents.
            if not isinstance(found, StepError) or device_fault(error):
                return found
            log_whole(error)
            name = type(error).__name__
            return EpisodeFailed(str(found), f"{name}: {error}", name, _place(error))

        blocking = not iscoroutinefunction(function)
        begin = self._behind_setup(plan, partial(_begin, function, context, own), blocking=blocking)
        about = (self._where(plan), failed, errors, sampling, self._loop)
        return GenerateStep(plan, begin, *about, blocking=blocking)

    def _behind_setup(self, plan: StepPlan, begin: Begin, *, blocking: bool) -> Begin:
        """The call of a generate step for an episode, once what its episodes share is there."""
        context = self._contexts[plan.name]
        make = getattr(self._functions[plan.name], ATTRIBUTE).setup
        if make is None:
            return begin
        what = f"the setup of {self._where(plan)}"
        failed = lambda error, did: str(step_error(error, f"{what} {did}"))  # noqa: E731
        setup = StepSetup(make, context, partial(setattr, context, "shared"), failed)
        return self._loop.behind(setup, begin, blocking=blocking)

    def check_keeps(self, name: str, before: Batch, after: Batch) -> None:
        """Raises StepError if the step gave a row a `drop_reason`, or a reason to be left out."""
        for reason in (DROP_REASON, LEFT_OUT):
            now = after.texts(reason) if reason in after else []
            had = before.texts(reason) if reason in before else [""] * len(now)
            rows = [row for row, text in enumerate(now) if text and not had[row]]
            if rows:
                raise StepError(
                    f"{self._where(self._plans[name])} wrote {reason} {now[rows[0]]!r} for {len(rows)} of {after.rows} "
                    f"samples, {_some_uids(after.select(rows))}: groups can be dropped, and samples left out, before "
                    "they are sent to the workers that train, and these have arrived — let the pool that generates run "
                    f"{name!r} (`roles`, `steps` of layout.pools), or let it drop nothing (the shipped reward step: "
                    "on_error zero or stop)"
                )

    @contextmanager
    def _reported(self, plan: StepPlan, batch: Batch | None) -> Iterator[None]:
        """Report what the step raises with its name, the worker and the uids in hand."""
        try:
            with UsersCode():
                yield
        except (Exception, SystemExit) as error:  # an exit would end the worker as if it was done
            uids = "" if batch is None or "uid" not in batch else f", {_some_uids(batch)}"
            raise self._raised(plan, error, uids) from error

    def _raised(self, plan: StepPlan, error: BaseException, uids: str) -> Exception:
        """What to raise for what a step has raised."""
        if isinstance(error, UserError):
            return UserError(f"{self._where(plan)}: {error}")
        if isinstance(error, DistflowError):
            return error
        step = self._contexts[plan.name].training_step
        what = f"step {plan.name!r} ({plan.call}) raised {type(error).__name__} on {self._worker}"
        return step_error(error, f"{what}, training step {step + 1}{uids}")

    def _checked(self, plan: StepPlan, batch: Batch, result: object) -> Batch:
        """The batch with what the step wrote, as other workers would get it back."""
        found = self._as_declared(plan, result)
        if found.rows != batch.rows:
            raise StepError(f"{self._where(plan)} turned {batch.rows} rows into {found.rows}; a step keeps every row")
        known = [field for field in found.columns if written(field, (*plan.writes, *plan.may_write))]
        wrong = complaint(found, known) or changed(batch, found, known)
        if wrong is not None:
            raise StepError(f"{self._where(plan)} {wrong}")
        more = [field for field in found.columns if field not in batch and field not in known]
        new = [field for field in more if (plan.name, field) not in self._told]
        self._told.update((plan.name, field) for field in new)
        if new:
            log.warning(
                "%s does not declare that it writes %s, so nobody gets it: add it to writes, or, of a score step, to "
                "may_write",
                self._where(plan),
                ", ".join(new),
            )
        return with_fields(batch, {field: found[field] for field in known}) if known else batch

    def _as_declared(self, plan: StepPlan, result: object) -> Batch:
        """What a step returned, if it is a batch with the fields that it declares."""
        where = self._where(plan)
        if not isinstance(result, Batch):
            raise StepError(
                f"{where} returned {type(result).__name__}; expected a Batch, for example batch.with_columns(…)"
            )
        missing = [field for field in plan.writes if field not in result and "*" not in field]
        if missing:
            raise StepError(
                f"{where} declares that it writes {missing}, but its batch has only {sorted(result.columns)}"
            )
        return result

    def _check_of_samples(self, plan: StepPlan, given: Batch, result: Batch) -> None:
        """Raises StepError for a value per token, which only tokens of the last sequences would get."""
        of_tokens = [name for name in result.columns if name in A_TOKEN and result[name] is not given.columns.get(name)]
        if of_tokens:
            raise StepError(
                f"{self._where(plan)} writes one value per response token into {of_tokens[0]!r}, and it gets the last "
                f"sequence of each sample — add {SEQUENCE!r} to its reads, and it gets all of them"
            )

    def _where(self, plan: StepPlan) -> str:
        return f"step {plan.name!r} ({plan.call}) on {self._worker}"


def _begin(
    function: Callable[..., Any],
    context: StepContext,
    settings: Mapping[LeaseKind, Mapping[str, Any]],
    episode: Episode,
    generate: Any,
) -> Any:
    return function(episode, generate, context, **settings[lease_kind(episode.uid.position)])


def by_kind(batch: Batch) -> dict[LeaseKind, list[int]]:
    """The rows of samples for training and of those for validation; kinds that there are none of are left out."""
    validates_B = batch.dense("group") >= VALIDATION if "group" in batch else torch.zeros(batch.rows, dtype=torch.bool)
    kinds: dict[LeaseKind, list[int]] = {
        "train": (~validates_B).nonzero().flatten().tolist(),
        "val": validates_B.nonzero().flatten().tolist(),
    }
    return {kind: rows for kind, rows in kinds.items() if rows}


def shown_uids(batch: Batch, most: int = SHOWN_UIDS) -> str:
    """Name the groups of a batch, at most so many."""
    if "uid" not in batch:
        return "groups without a uid"
    return _shown(sorted({tuple(uid) for uid in batch.dense("uid").tolist()}, key=lambda uid: uid[2]), most)


def _shown(uids: Sequence[tuple[int, ...]], most: int) -> str:
    more = f" and {len(uids) - most} more" if len(uids) > most else ""
    return f"uids (epoch, prompt, position) {', '.join(map(str, uids[:most]))}{more}"


def _some_uids(batch: Batch) -> str:
    return f"with {shown_uids(batch)} in hand"


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Report what a user's code raises inside as a StepError; `what` says in one line which code, and where."""
    try:
        with UsersCode():
            yield
    except DistflowError:
        raise
    except (Exception, SystemExit) as error:  # an exit would end a thread without a word, or the worker as if done
        raise step_error(error, what) from error


def step_error(error: BaseException, what: str) -> StepError:
    """A StepError with the user's own frames of `error` first; `what` says in one line which code failed, and where."""
    return StepError(f"{_own_frames(error)}{what}")


def split(error: StepError) -> tuple[str, str]:
    """The user's frames with the error they ended in, empty if a function only returned something wrong; and the line
    that says where it happened."""
    frames, _, what = str(error).rpartition("\n")
    return frames, what


def _own_frames(error: BaseException) -> str:
    """The user's frames, with the error itself."""
    cure = loop_cure(error)
    shown = [*traceback.format_list(frames_of(error)), *traceback.format_exception_only(error)]
    return "".join([*shown, *([f"{cure}\n"] if cure else [])])


def _place(error: BaseException) -> str:
    """`file:line` of the innermost frame in the first file of the user's; "" if there is none."""
    return innermost([(frame.filename, frame.lineno) for frame in frames_of(error)])
