"""Runs step functions: resolves them inside this worker, hands them their context, and checks what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distflow.data.batch import Batch
from distflow.errors import DistflowError, StepError, UserError
from distflow.flow.graph import written
from distflow.flow.plan import StepPlan
from distflow.flow.resolve import check_step, resolve
from distflow.runtime.context import StepContext
from distflow.runtime.user_errors import step_error, wrong_shape

SHOWN_UIDS = 4


class StepRunner:
    """The steps of one worker, by name. Raises PluginError at once for one that cannot be imported or does not fit."""

    def __init__(self, worker: str, steps: Sequence[StepPlan], contexts: Mapping[str, StepContext]) -> None:
        self._worker = worker
        self._plans = {step.name: step for step in steps}
        self._contexts = contexts
        self._functions: dict[str, Callable[..., Any]] = {}
        for step in steps:
            function = resolve(step.call)
            check_step(function, step)
            self._functions[step.name] = function

    def call(self, name: str, batch: Batch) -> Batch:
        """Run a step over a batch; raises StepError with the user's frames first, UserError for wrong settings."""
        plan, context = self._plans[name], self._contexts[name]
        try:
            with context.metrics.timed(f"timing_s/{name}", plan.role):
                result = self._functions[name](batch, context, **plan.settings)
        except UserError as error:
            raise UserError(f"step {name!r} ({plan.call}) on {self._worker}: {error}") from error
        except DistflowError:
            raise
        except Exception as error:
            raise self._failure(name, error, batch) from error
        return self._checked(plan, batch, result)

    def generate(self, name: str, leases: object) -> Iterator[Batch]:
        """Run a generate step, which turns leases into batches of whole groups."""
        plan, context = self._plans[name], self._contexts[name]
        stream = self._functions[name](leases, context, **plan.settings)
        while True:
            try:
                groups = next(stream)
            except StopIteration:
                return
            except DistflowError:
                raise
            except Exception as error:
                raise self._failure(name, error, None) from error
            yield groups

    def _checked(self, plan: StepPlan, batch: Batch, result: object) -> Batch:
        where = f"step {plan.name!r} ({plan.call}) on {self._worker}"
        if not isinstance(result, Batch):
            raise StepError(
                f"{where} returned {type(result).__name__}; expected a Batch, for example batch.with_columns(…)"
            )
        missing = [field for field in plan.writes if field not in result and "*" not in field]
        if missing:
            raise StepError(
                f"{where} declares that it writes {missing}, but its batch has only {sorted(result.columns)}"
            )
        if result.rows != batch.rows:
            raise StepError(f"{where} turned {batch.rows} rows into {result.rows}; a step keeps every row")
        complaint = wrong_shape(result, [field for field in result.columns if written(field, plan.writes)])
        if complaint is not None:
            raise StepError(f"{where} {complaint}")
        return result

    def _failure(self, name: str, error: Exception, batch: Batch | None) -> StepError:
        step = self._contexts[name].training_step
        uids = "" if batch is None or "uid" not in batch else f", {_some_uids(batch)}"
        what = f"step {name!r} ({self._plans[name].call}) raised {type(error).__name__} on {self._worker}"
        return step_error(error, f"{what}, training step {step}{uids}")


def _some_uids(batch: Batch) -> str:
    uids = sorted({tuple(uid) for uid in batch.dense("uid").tolist()}, key=lambda uid: uid[2])
    more = f" and {len(uids) - SHOWN_UIDS} more" if len(uids) > SHOWN_UIDS else ""
    return f"with uids (epoch, prompt, position) {', '.join(map(str, uids[:SHOWN_UIDS]))}{more} in hand"
