"""Settings that owners and holders share: the arithmetic of ledgers, the staleness bound, memory and timing.

A set of ledgers is for training or for validation. That of validation has a single ledger, of the first owner; its
*step* r is round r, on the weights of version `versions[r]`, and its positions begin at `VALIDATION`.

Arithmetic: global prompt position i stands in ledger j = i mod K as its k-th entry, k = i div K. Owner number j mod R
(of R owners, in the order of the training pool) owns ledger j. Each ledger feeds b groups to every training
step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distflow.config.schema import Schedule
from distflow.data.difficulty import Difficulty
from distflow.errors import UserError
from distflow.flow.memory import MIB, group_bytes
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.plugin_options import repeats_samples
from distflow.types import VALIDATION, LeaseKind

MESSAGE_BYTES = 4 << 20
"""Most bytes of leases, tokens or results in one message, unless a single group is larger."""


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Raises UserError for values that cannot work, naming the recipe's key."""

    ledgers: int
    """K, `batch.ledgers`."""
    groups_per_ledger: int
    """b = `batch.prompts` / K: groups that one ledger feeds to one training step."""
    samples_per_prompt: int
    """G, samples of one group."""
    max_staleness: int | None
    """s: a group trained at step t was started on a version ≥ t − s. None: no bound, and any arrived group counts."""
    training_steps: int
    """T: length of the run in training steps."""
    memory_bytes: int
    """Bytes that one owner reserves for leased and arrived results, split evenly over its ledgers."""
    group_bytes: Callable[[int], int]
    """Upper bound of the bytes of one group's result, by the number of its prompt's tokens."""
    max_prompt_tokens: int
    """Longest prompt there may be, in tokens."""
    kind: LeaseKind = "train"
    versions: Sequence[int] = ()
    """Of validation: the version that each round measures, rising."""
    seed: int = 0
    """The run's seed; leases pass it on to the engines."""
    max_refills: int | None = None
    """Dropped groups that a ledger may replace before the run stops, for each training step open to leasing (s + 1 of
    them, fewer at the end), reset at every version; None: 10·b."""
    difficulty: Difficulty | None = None
    """Of owners: whether the prompt of a position is leased at all, by what was known at the lowest version on which
    its group may start. None: every one is."""
    schedule: Schedule = "fifo"
    """In which order owners lease the positions that the gate lets through, and to whom."""
    announce_closed: bool = False
    """Owners tell the holders when a training step's set is complete (colocated layouts wait for that)."""
    hedging: bool = False
    """Any worker gets a copy of a group whose holders are all silent, a nearly idle one a copy of a slow group."""
    copies_slow: bool = True
    """Whether slow groups are copied, too, where there is `hedging`: not if a copy would have other tokens, since of
    two draws the shorter one is complete first."""
    hedge_s: float = 1.0
    """Seconds after which a nearly idle worker may get a copy of a leased group, but at least twice the usual duration
    of a group: copies are for stragglers."""
    silence_s: float = 5.0
    """Seconds without a message after which a holder counts as silent: not lost, but not waited for."""
    host_silence_s: float | None = None
    """`limits.host_silence_s`: seconds without a message after which a holder loses its leases, with or without
    `hedging`: no agent reports the workers of a host without power or network as lost. None: never."""
    partial_rollouts: bool = False
    """Progress reports include the tokens of running samples, so that another worker can continue them."""
    message_bytes: int = MESSAGE_BYTES
    """Most bytes of leases and tokens under way to one peer, apart from a single larger lease. A grant contains as many
    leases as fit, and the next ones follow once it is known to have arrived; so does what is handed back."""
    resend_s: float = 1.0
    """Seconds before an ask, a grant or a result without an answer is sent again."""
    report_s: float = 1.0
    """Seconds between two progress reports of a holder."""
    park_s: float = 1.0
    """Seconds (± 50%) an ask stays parked before it moves on; doubled each time and with each refusal."""
    park_limit_s: float = 16.0
    """Upper limit of `park_s` (± 50%)."""

    def __post_init__(self) -> None:
        for key, value, least in (
            ("batch.ledgers", self.ledgers, 1),
            ("batch.prompts per ledger", self.groups_per_ledger, 1),
            ("batch.samples_per_prompt", self.samples_per_prompt, 1),
            ("layout.max_staleness", self.max_staleness or 0, 0),
            ("run.training_steps", self.training_steps, 0),
            ("data.max_prompt_tokens", self.max_prompt_tokens, 1),
            ("batch.max_refills", self.refill_limit, 0),
        ):
            if value < least:
                raise UserError(f"{key} is {value}: expected at least {least}")

    @property
    def refill_limit(self) -> int:
        """`max_refills`, or its default 10·b."""
        return 10 * self.groups_per_ledger if self.max_refills is None else self.max_refills

    @property
    def free_order(self) -> bool:
        """A training step takes groups in order of arrival, rather than the first of the data order."""
        return self.max_staleness is None

    def open_steps(self, version: int) -> int:
        """Training steps whose groups may be leased at this version, the open one included."""
        left = self.training_steps - version
        return left if self.max_staleness is None else min(1 + self.max_staleness, left)

    @property
    def first_position(self) -> int:
        """The lowest prompt position of these ledgers."""
        return VALIDATION if self.kind == "val" else 0

    def ledger_of(self, position: int) -> int:
        """Ledger j of a prompt position."""
        return (position - self.first_position) % self.ledgers

    def k_of(self, position: int) -> int:
        """Place k of a prompt position within its ledger."""
        return (position - self.first_position) // self.ledgers

    def position_of(self, ledger: int, k: int) -> int:
        """The prompt position at place k of a ledger."""
        return self.first_position + k * self.ledgers + ledger

    def owner_of(self, position: int, owners: int) -> int:
        """Number (0 … R−1) of the owner that owns a prompt position, among `owners` = R."""
        return self.ledger_of(position) % owners

    def least_version(self, step: int) -> int:
        """The lowest version on which a group of this step may start."""
        if self.versions:
            return self.versions[min(step, len(self.versions) - 1)]
        return 0 if self.max_staleness is None else max(0, step - self.max_staleness)

    def rounds_due(self, version: int) -> int:
        """Rounds of validation that are due once there is this version."""
        return bisect_right(self.versions, version)

    def ledger_memory(self, own_ledgers: int) -> int:
        """Bytes of each of an owner's ledgers. Raises UserError when b of the largest groups do not fit."""
        share = self.memory_bytes // own_ledgers
        largest = self.group_bytes(self.max_prompt_tokens)
        need = largest * self.groups_per_ledger
        if share < need:
            raise UserError(
                f"sample_memory_mb: {self.memory_bytes} bytes over {own_ledgers} ledgers are {share} bytes each, "
                f"but one training step of a ledger may need {need} (groups: {self.groups_per_ledger}, largest group: "
                f"{largest} bytes): reserve at least {-(-need * own_ledgers // 2**20)} MiB, "
                "or shorten the responses or prompts"
            )
        return share


def planned_settings(plan: Plan, owner: WorkerPlan) -> LeaseSettings:
    """The settings that a plan implies for training, with the memory of this owner."""
    recipe, batch = plan.recipe, plan.batch
    new_tokens, samples, later = plan.response_tokens, batch.samples_per_prompt, plan.later_bytes
    return LeaseSettings(
        ledgers=batch.ledgers,
        groups_per_ledger=batch.groups_per_ledger,
        samples_per_prompt=samples,
        max_staleness=batch.max_staleness,
        training_steps=batch.training_steps,
        memory_bytes=owner.sample_memory_mb * MIB,
        group_bytes=lambda prompt_tokens: group_bytes(samples, prompt_tokens, new_tokens, later),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        seed=recipe.run.seed,
        max_refills=batch.max_refills,
        schedule=batch.schedule,
        announce_closed=bool(owner.generates),
        hedging=recipe.layout.hedging and plan.origin.allows("repeatable"),
        copies_slow=repeats_samples(plan),
        host_silence_s=recipe.limits.host_silence_s,
        partial_rollouts=recipe.layout.partial_rollouts and plan.origin.allows("replay"),
    )
