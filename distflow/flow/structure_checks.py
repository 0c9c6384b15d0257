"""Checks of steps and pools alone, as one table, for recipes whose other sections may be wrong.

The first rows refuse what the plan can say and the runtime cannot do yet: each goes when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from distflow.errors import Problems, did_you_mean
from distflow.flow.graph import StepNode
from distflow.flow.model_fit import check_heads, check_own_models, check_tokens
from distflow.flow.per_worker_steps import EVERY
from distflow.flow.plan import PoolPlan
from distflow.flow.step import BY_CLIENT, CLIENT_KINDS, FILTERED, GENERATED
from distflow.flow.structure import Structure
from distflow.types import A_TOKEN, DROP_REASON, REWARD, is_logged, is_reward_part, written

_A_SAMPLE = (REWARD, "score")
StructureCheck = Callable[[Structure, Problems], None]


def check_structure(structure: Structure, problems: Problems) -> None:
    """Add everything that is wrong, in the order of the table."""
    found = Problems(problems.where)
    for check, when in STRUCTURE_CHECKS:
        if when == "always" or not found:
            check(structure, found)
    problems += found


def check_further_generation(structure: Structure, problems: Problems) -> None:
    """Refuse where, and beside what, further models do not generate."""
    by_name = {pool.name: pool for pool in structure.pools}
    for node in structure.steps:
        if not node.generates_further or node.name not in structure.sites:
            continue
        key, pool = f"layout.pools.{structure.sites[node.name]}.steps", by_name[structure.sites[node.name]]
        for message, hint in _further_complaints(node, pool, structure):
            problems.add(key, f"step {node.name!r} generates with {node.model!r} {message}: not built yet", hint)
    several = [node for node in structure.steps if node.role == "generate" and _has_environment(node)]
    if several and any(node.generates_further for node in structure.steps):
        message = (
            "has an environment, and beside a further model that generates samples have one sequence: not built yet"
        )
        problems.add(
            f"flow.steps.{several[0].name}", message, "generate steps of one turn, or one model that generates"
        )


def _has_environment(node: StepNode) -> bool:
    return node.declaration.spec.environment is not None


def _further_complaints(node: StepNode, pool: PoolPlan, structure: Structure) -> Iterator[tuple[str, str]]:
    if structure.models.primary in pool.generates:
        return
    if pool == structure.home:
        yield f"on pool {pool.name!r}, which trains and does not generate", f"leave it to {structure.rollout.name!r}"
        return
    others = [name for name in pool.steps if name != node.name and not _at_home(name, pool, structure)]
    if others:
        yield f"on a pool that runs {', '.join(others)} for others too", "give it a pool of its own"


def _at_home(name: str, pool: PoolPlan, structure: Structure) -> bool:
    """Whether a step computes with a model that its pool trains."""
    node = next(node for node in structure.steps if node.name == name)
    return node.model in pool.homes and node.role != "generate"


def check_homes(structure: Structure, problems: Problems) -> None:
    """Refuse a model that is trained on two pools, and train steps without a model off the home of the policy."""
    for model in structure.models.trained:
        pools = [pool.name for pool in structure.pools if model in pool.homes]
        if len(pools) > 1:
            message = f"model {model!r} is trained on the pools {', '.join(pools)}"
            problems.add("layout.pools", message, "give all of its train steps to one pool: it is the model's home")
    for node in structure.after_custody:
        pool, home = structure.sites[node.name], structure.home.name
        if node.role == "train" and node.model is None and pool != home:
            policy = structure.models.primary
            message = (
                f"step {node.name!r} of role 'train', without a model, runs where the samples are: on pool {home!r}, "
                f"which trains {policy!r}"
            )
            hint = f"leave it to pool {home!r}, or what trains {policy!r} to pool {pool!r}"
            problems.add(f"layout.pools.{pool}.steps", message, hint, others=[f"layout.pools.{home}.steps"])


def check_further_homes(structure: Structure, problems: Problems) -> None:
    """Refuse to generate with other models, or to hold frozen ones, on the pool of a further trained model."""
    for pool in structure.pools:
        if not pool.homes or pool.name == structure.home.name:
            continue
        others = [node for node in structure.on(pool.name) if _strange(node, pool)]
        if others:
            steps = ", ".join(f"step {node.name!r} of role {node.role!r}" for node in others)
            message = f"{steps} on the pool that trains {', '.join(pool.homes)}: not built yet"
            early = all(node.role in ("generate", "score") for node in others)
            better = structure.rollout if early else structure.home
            hint = f"leave it to {better.name!r}" if better != pool else "leave it to a pool that does not train"
            problems.add(f"layout.pools.{pool.name}.steps", message, hint)


def _strange(node: StepNode, pool: PoolPlan) -> bool:
    """Whether the home of further models does not run such a step."""
    return node.role == "score" or node.model not in pool.homes


def check_asked(structure: Structure, problems: Problems) -> None:
    """Refuse steps that other workers ask for and that are no function of their rows: a request may be repeated."""
    rollout, home = structure.rollout.name, structure.home.name
    for node in (*structure.before_custody, *structure.after_custody):
        pool, owners = structure.sites[node.name], node in structure.after_custody
        if node.role == "train" or (pool == home if owners else pool == rollout):
            continue
        asker = home if owners else rollout
        where = f"runs on pool {pool!r} for the workers of {asker!r}"
        if node.declaration.keeps_state:
            message = f"{where} and uses ctx.state, which neither several workers share nor a restarted one gets back"
            hint = f"write a function of the batch alone, or add {node.name} to the `steps` of {asker}"
            problems.add(f"flow.steps.{node.name}", message, hint)
        if node.declaration.spec.scope == "batch":
            message = f"{where} and has batch scope, but it is asked for group by group"
            problems.add(f"flow.steps.{node.name}", message, f"scope group or sample, or a step of {home}")


def check_clients(structure: Structure, problems: Problems) -> None:
    """Refuse fields that clients cannot write, or cannot see when samples arrive."""
    after, home = structure.after_custody, structure.home.name
    here = [other for other in after if other.role not in ("client", "forward") or structure.sites[other.name] == home]
    environments = [node.name for node in structure.steps if _has_environment(node)]
    for node in (node for node in structure.steps if node.role == "client"):
        key = f"flow.steps.{node.name}"
        if environments:
            message = f"clients write one value for each row, and samples of {environments[0]!r} may have several rows"
            problems.add(key, f"{message}: not built yet", "a generate step of one turn")
        for message, hint in _client_complaints(node):
            problems.add(key, message, hint)
        for field, other in _late_reads(node, [one for one in here if one.role != "client"]):
            message = f"shows clients {field!r}, which step {other.name!r} writes only once their answers are there"
            problems.add(f"{key}.with.reads", message, "fields that samples have when they arrive")


def _client_complaints(node: StepNode) -> Iterator[tuple[str, str]]:
    if node.declaration.call != BY_CLIENT:
        yield "has the role client, which is for fields that a recipe names", f"call: {BY_CLIENT}"
    if node.model is not None or node.prefix:
        yield "is answered by clients, and has a model or a prefix", "remove them"
    writes = node.settings.get("writes")
    if not node.writes or not node.reads:
        yield "names no fields", "with: {reads: [prompt_text, response_text], writes: {reward: number}}"
    for field, kind in writes.items() if isinstance(writes, Mapping) else ():
        if kind not in CLIENT_KINDS:
            yield f"writes {field!r} of kind {kind!r}", did_you_mean(str(kind), CLIENT_KINDS)
        elif field in (*GENERATED, FILTERED, DROP_REASON) or is_reward_part(field) or is_logged(field) or "*" in field:
            yield f"writes {field!r}, which only other steps write", "a field of another name"
        elif field in (*A_TOKEN, *_A_SAMPLE):
            wanted = "number_per_token" if field in A_TOKEN else "number"
            if kind != wanted:
                yield f"writes {field!r} of kind {kind!r}", f"{field}: {wanted}"


def check_forward_readers(structure: Structure, problems: Problems) -> None:
    """Refuse to compute with a trained model outside its home: only engines take new versions."""
    for node in structure.after_custody + structure.before_custody:
        pool = next(pool for pool in structure.pools if pool.name == structure.sites[node.name])
        if node.role in ("forward", "score") and node.model in structure.models.trained and node.model in pool.frozen:
            message = (
                f"step {node.name!r} computes with {node.model!r}, which is trained on another pool; backends cannot "
                "take its new versions yet"
            )
            if node.role == "forward":
                hint = f"remove {node.name} from them: it then runs where {node.model!r} is trained"
                problems.add(f"layout.pools.{pool.name}.steps", message, hint)
            else:
                hint = f'a model that no step trains; for log-probs of {node.model!r}, a step with role="forward"'
                problems.add(f"flow.steps.{node.name}.model", message, hint)


def check_custody(structure: Structure, problems: Problems) -> None:
    """Refuse to read what is written later: before the samples are sent, what is written only behind that; in forward
    steps that owners ask another pool for when samples arrive, what is written by their own pool.
    """
    after, home = structure.after_custody, structure.home.name
    asked = [node for node in after if node.role == "forward" and structure.sites[node.name] != home]
    here = [node for node in after if node not in asked]
    for node, later in (*((node, after) for node in structure.before_custody), *((node, here) for node in asked)):
        for field, other in _late_reads(node, later):
            message = (
                f"runs on pool {structure.sites[node.name]!r} and reads {field!r}, which step {other.name!r} writes "
                "only after the samples have gone to the training pool"
            )
            hint = f"add {node.name} to the `steps` of the training pool"
            problems.add(f"flow.steps.{node.name}", message, hint)


def _late_reads(node: StepNode, later: Sequence[StepNode]) -> Iterator[tuple[str, StepNode]]:
    for other in later:
        yield from ((field, other) for field in node.reads if written(field, other.writes))


def check_drop_reason(structure: Structure, problems: Problems) -> None:
    """Refuse to drop samples, or to leave them out, anywhere but in score steps before custody: owners accept whatever
    arrives."""
    for node in structure.after_custody:
        if node.drops == "declared":
            what = "leave samples out" if node.settings.get("on_error") == "leave_out" else "drop samples"
            message = (
                f"may {what} and runs on pool {structure.sites[node.name]!r} after they have arrived there, when "
                "nothing replaces them any more"
            )
            hint = f"add {node.name} to the `steps` of {structure.rollout.name!r}, or of a service"
            if structure.rollout.name == structure.sites[node.name]:
                hint = "let it read only what is written before the samples are sent, or drop nothing"
            hint += ", or set on_error to zero or stop" if "on_error" in node.settings else ""
            problems.add(f"flow.steps.{node.name}", message, hint)
    for node in (*structure.steps, *structure.unread, *structure.private.all):
        if node.role != "score" and written(DROP_REASON, node.writes):
            message = f"has the role {node.role!r} and writes {DROP_REASON!r}, by which only score steps drop samples"
            problems.add(f"flow.steps.{node.name}", message, 'declare it with role="score"')


def check_private_steps(structure: Structure, problems: Problems) -> None:
    """Check that private steps are on generating workers, and that they read only fields of the shared steps there."""
    names = {node.name for node in structure.steps}
    there = [field for node in structure.before_custody for field in node.writes]
    generating = [pool.name for pool in structure.pools if structure.models.primary in pool.generates]
    for (pool, index), nodes in structure.private.by_worker.items():
        key = f"layout.pools.{pool}" + (f".each.{index}.steps" if index != EVERY else ".steps")
        if pool not in generating:
            hint = f"put them on pool {generating[0]!r}" if generating else "remove them: this flow generates nothing"
            message = f"a worker's own steps need a pool that generates with {structure.models.primary!r}"
            problems.add(key, message, hint)
            continue
        for node in nodes:
            if node.name in names:
                hint = "rename the function"
                problems.add(key, f"the flow has a step {node.name!r} already", hint)
            for field in node.reads:
                if not written(field, there):
                    message = f"step {node.name!r} reads {field!r}, which is not available before samples are sent"
                    problems.add(key, message, f"there are: {', '.join(there)}")


def check_reading(structure: Structure, problems: Problems) -> None:
    """Refuse, where samples are read from the data, what needs generation, and to train several models on them."""
    read = structure.reads
    if read is None:
        return
    for node in structure.steps:
        if node is not read and node.role in ("generate", "read", "score", "client"):
            message = f"has the role {node.role!r}, and step {read.name!r} reads the samples from the data"
            nothing = "remove it: nothing is judged there"
            hints = {"score": nothing, "client": nothing, "read": "keep one of them"}
            problems.add(f"flow.steps.{node.name}", message, hints.get(node.role, "keep one of them"))
    if read.model is not None or read.prefix:
        key = "model" if read.model is not None else "prefix"
        problems.add(f"flow.steps.{read.name}.{key}", "reads a row of the data, with no model", "remove it")
    if len(structure.models.trained) > 1:
        names = " and ".join(structure.models.trained)
        message = f"trains {names}; several models trained on samples of the data are not built yet"
        problems.add("flow.steps", message, "train steps of one model", others=["models"])


STRUCTURE_CHECKS: tuple[tuple[StructureCheck, Literal["always", "if sound"]], ...] = (
    (check_further_generation, "if sound"),
    (check_reading, "always"),
    (check_homes, "always"),
    (check_further_homes, "if sound"),
    (check_forward_readers, "always"),
    (check_clients, "always"),
    (check_custody, "if sound"),
    (check_private_steps, "if sound"),
    (check_drop_reason, "always"),
    (check_asked, "always"),
    (check_heads, "always"),
    (check_own_models, "if sound"),
    (check_tokens, "if sound"),
)
