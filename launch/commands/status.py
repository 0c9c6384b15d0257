"""`distflow status`, `watch` and `stacks`: what the workers of a run report about themselves, once or until it ends."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from distflow.launch.observe.wait_graph import WaitGraph
    from distflow.launch.run.record import RunRecord, SubmittedJob

ANSWER_S = 2.0
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
STARTING = ("CONFIGURING", "RUNNING")
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
"""States of a job by Slurm: in the queue, on its nodes, and over; of others nothing is advised."""
TABLE = ("name", "pid", "host", "state", "step", "version", "memory MB", "sent MB", "received MB", "sent by lane, MB")
COUNTED = ("unread", "claimed", "missed", "kept_bytes")
"""Of a consumer, what adds up over the owners."""
MEAN_OF = 10
"""Training steps by which it is told what another number of generating workers would bring."""
WIDTH = 200
"""Width of a table written to a pipe or a file."""


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, as_json: bool, runs_dir: Path) -> None:
    """Show what each worker of RUN (default: the newest) is doing and what it waits for."""
    from distflow.launch.observe.alerts import not_numbers, restarts, troubles
    from distflow.launch.run.folder import find_run, run_options, run_word
    from distflow.launch.run.record import FILE_NAME, read_job

    run_dir = find_run(run, runs_dir, queued=True)
    if not (run_dir / FILE_NAME).is_file() and (job := read_job(run_dir)) is not None:
        _show_queued(run_dir, job, as_json=as_json)
        return
    seen = look(run_dir)
    if as_json:
        click.echo(json.dumps(seen.as_json()))
        return
    record = seen.record
    steps = _steps(record)
    for line in _headline(record, steps):
        click.echo(line)
    if seen.lost:
        click.echo(
            "none of its processes is alive — resume it with `distflow launch --resume "
            f"{run_options(record.path)}`, or clean up with `distflow stop {run_word(record.path)}`"
        )
    for line in (*_resumes(record), *restarts(record, seen.rows), *troubles(steps), *not_numbers(steps)):
        click.echo(line)
    if not record.over:
        _print_table(seen.rows)
        for line in (*_findings(record, seen.rows, seen.graph), *_other_count(record, steps)):
            click.echo(line)


def _show_queued(run_dir: Path, job: SubmittedJob, *, as_json: bool) -> None:
    """Show where a job stands that has not started its run yet."""
    from distflow.launch.deploy.job_environment import ask_queue

    state, reason = ask_queue(job.number)
    if as_json:
        told = {"number": job.number, "state": state or None, "reason": reason, "submitted": job.submitted}
        begun = "queued" if state in WAITING else "not begun"
        click.echo(json.dumps({"run": run_dir.name, "state": begun, "job": {**told, "log": job.log}}))
        return
    minutes = max(0.0, time.time() - job.submitted) / 60
    since = f"submitted {minutes:.0f} min ago" if minutes < 120 else f"submitted {minutes / 60:.0f} h ago"
    if state:
        what = "queued" if state in WAITING else "not begun"
        told_state = f"{state} ({reason})" if reason else state
        click.echo(f"{run_dir}: {what}; job {job.number} is {told_state}, {since}")
    elif reason:
        click.echo(f"{run_dir}: not begun; job {job.number}, {since}; {reason}")
    else:
        click.echo(f"{run_dir}: not begun; Slurm has no job {job.number} any more, {since}")
    if state in WAITING:
        click.echo(f"it runs with the recipe as it was then; `scancel {job.number}` takes it out of the queue")
    elif Path(job.log).is_file():
        click.echo(f"log: {job.log}")
    elif state in ENDED or not (state or reason):
        click.echo(f"nothing of it was written: submit it again after `rm -r {shlex.quote(str(run_dir))}`")


def _resumes(record: RunRecord) -> Iterator[str]:
    """Tell of a job in the queue that will go on with a run that is not at its end."""
    from distflow.launch.deploy.job_environment import ask_queue
    from distflow.launch.run.record import read_job

    job = read_job(record.path) if record.over and record.state != "done" else None
    if job is None:
        return
    state, reason = ask_queue(job.number)
    if state in (*WAITING, *STARTING):
        yield f"job {job.number} will go on with it: {state}" + (f" ({reason})" if reason else "")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at a run shows."""

    record: RunRecord
    """With its end filled in if it was lost."""
    lost: bool
    """Whether none of its processes is alive, and no end is recorded."""
    rows: list[dict[str, Any]]
    """What the workers say of themselves."""
    graph: WaitGraph

    def as_json(self) -> dict[str, Any]:
        """What `status --json` prints, and `Run.status()` returns."""
        record, graph = self.record, self.graph
        waits = [wait.as_json() for wait in graph.waits]
        told = {"run": record.name, "state": record.state, "lost": self.lost, "workers": self.rows, "waits": waits}
        told |= {"verdict": graph.verdict(), "consumers": _consumers(self.rows), **_progress(record)}
        told |= {"prompts": one} if (one := _prompts(self.rows)) else {}
        told["bad_gpus"] = [{"host": one.host, "gpu": one.number, "faults": one.faults} for one in record.bad_gpus]
        lost_hosts = [record.hosts[number].name for number in record.silent]
        return told | ({"silent_hosts": lost_hosts} if record.hosts else {})


def look(run_dir: Path) -> Seen:
    """Read the record of a run and ask its workers."""
    from distflow.launch.deploy.multi_host import latest_record
    from distflow.launch.observe.run_client import worker_rows
    from distflow.launch.observe.wait_graph import UNRESPONSIVE, wait_graph
    from distflow.launch.run.exit_status import as_it_ended
    from distflow.launch.run.process_table import describe_state, is_lost, running

    record = latest_record(run_dir)
    lost = is_lost(record)
    if lost:
        # It may have ended meanwhile.
        record = latest_record(record.path)
        lost = not record.over
    if lost:
        record = as_it_ended(record)
    rows = worker_rows(record, ANSWER_S)
    silent = [row["name"] for row in rows if row["state"] == UNRESPONSIVE and running(record.pids.get(row["name"]))]
    graph = wait_graph(rows, {name: describe_state(record.pids[name].pid) for name in silent})
    return Seen(record, lost, rows, graph)


def _findings(record: RunRecord, rows: list[dict[str, Any]], graph: WaitGraph) -> Iterator[str]:
    """Lines about anything unusual in a running run."""
    from distflow.launch.observe.alerts import copy_troubles, counted_rewards, dropped, outside_waits, tracker_troubles
    from distflow.launch.observe.progress import arriving
    from distflow.launch.observe.run_client import without_agents

    for number in record.silent:
        yield (
            f"{record.hosts[number].name}: no message from its agent for {record.host_silence_s:g} s or more; "
            "its workers may still be running"
        )
    for bad in record.bad_gpus:
        where = record.hosts[bad.host].name if record.hosts else "this machine"
        yield (
            f"GPU {bad.number} of {where} has failed {bad.faults} times in this run (see the workers' logs, `dmesg`, "
            "`nvidia-smi -q`) — reset or replace it, or stop the run and go on without it: leave it out of "
            "CUDA_VISIBLE_DEVICES, and `distflow launch --resume` with fewer workers there (layout.pools.NAME.each)"
        )
    yield from filter(None, [without_agents(record), arriving(rows), counted_rewards(rows)])
    yield from (*tracker_troubles(rows), *copy_troubles(rows))
    yield from map(_consumer_line, _consumers(rows))
    if prompts := _prompts(rows):
        those = "all of them" if prompts["ended"] else f"of {prompts['of']}"
        yield f"prompts that clients have put: {prompts['rows']} {those}, {prompts['waiting']} yet to be begun"
    sent = [f"{row['name']} {told}" for row in rows if (told := _weights(row))]
    if sent:
        yield f"weights between hosts: {', '.join(sent)}"
    yield from _weights_in_parts(rows)
    yield from (*outside_waits(rows), *graph.lines())
    lost_records = dropped(rows)
    if lost_records:
        yield f"the disk of {record.run_dir} was full{lost_records}"


def _weights_in_parts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How weights come where trainers send each its part, as the first worker that answers says."""
    told: dict[str, dict[str, Any]] = {}
    for one in (one for row in rows for one in row.get("weights_in_parts", ())):
        told.setdefault(one["model"], one)
    for model, one in told.items():
        group = f"a group of {one['members']} workers" if one["members"] else "no group now: by the other lanes"
        yield f"weights of {model} in parts: {one['versions']} versions, the last {one['version']}; {group}"


def _consumers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far each consumer of samples outside the run is, at all owners together."""
    found: dict[str, dict[str, Any]] = {}
    for own in (one for row in rows for one in row.get("consumers", ())):
        known = found.setdefault(own["name"], {**own, **dict.fromkeys(COUNTED, 0), "clients": 0})
        known |= {name: known[name] + own[name] for name in COUNTED}
        # Each client asks every owner.
        known["clients"] = max(known["clients"], own["clients"])
    return list(found.values())


def _prompts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the rows are that clients put, at the owner that has most; empty where they put none."""
    found = [one for row in rows for one in row.get("prompts", ())]
    begun = max((one["begun"] for one in found), default=0)
    most = max(found, key=lambda one: one["rows"], default=None)
    return {} if most is None else {**most, "begun": begun, "waiting": max(0, most["rows"] - begun)}


def _weights(row: dict[str, Any]) -> str:
    """What a worker has sent of weights to readers on other hosts, and fetched from there; empty if nothing."""
    found = row.get("weights", [])
    counted = ("fetched_bytes", "read_bytes", "sent_bytes")
    fetched, read, sent = (sum(one.get(name, 0) for one in found) for name in counted)
    readers = sum(one["readers"] for one in found)
    by_nixl = f", {read / 1e6:.1f} MB of that by NIXL" if read else ""
    told = [f"has fetched {fetched / 1e6:.1f} MB{by_nixl}"] if fetched else []
    told += [f"has sent {sent / 1e6:.1f} MB ({readers} connected)"] if sent or readers else []
    return " and ".join(told)


def _consumer_line(one: dict[str, Any]) -> str:
    clients = "1 client" if one["clients"] == 1 else f"{one['clients']} clients"
    kind = "lossless consumer" if one["lossless"] else "consumer"
    return (
        f"{kind} {one['name']!r} outside the run, {clients}: {one['unread']} groups unread, {one['claimed']} claimed, "
        f"{one['missed']} missed, {one['kept_bytes'] / 1e6:.1f} MB kept"
    )


def _steps(record: RunRecord) -> list[dict[str, float]]:
    from distflow.launch.observe.file_sync import read_steps

    return read_steps(record.path, lambda line: click.echo(line, err=True))


def _other_count(record: RunRecord, steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """What another number of generating workers would bring."""
    from distflow.launch.run.folder import run_word
    from distflow.metrics.rollout_count import other_count
    from distflow.types import WorkerName

    makers = [WorkerName.parse(entry.name).pool for entry in record.workers if entry.generates and not entry.trains]
    if len(set(makers)) == 1:
        yield from other_count(steps[-MEAN_OF:], makers[0], len(makers), run_word(record.path))


def _headline(record: RunRecord, steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Progress of the run, and why it failed if it did."""
    from distflow.launch.observe.run_summary import held_out, progress_of, root_cause
    from distflow.launch.run.resume import best_checkpoint

    progress = progress_of(record, steps)
    score = "" if progress.score is None else f", score {progress.score:.3f} (mean of the last {progress.scored})"
    yield f"{record.run_dir}: {progress}{score}"
    yield from held_out(steps, best_checkpoint(record.path, steps))
    if record.failure is not None:
        cause, where = root_cause(record.failure)
        yield f"cause: {cause}"
        if where:
            yield f"in: {where}"
        if record.failure.log:
            yield f"log: {record.failure.log}"


def _progress(record: RunRecord) -> dict[str, Any]:
    from distflow.launch.observe.run_summary import progress_of, root_cause

    progress = progress_of(record, _steps(record))
    cause = None if record.failure is None else root_cause(record.failure)[0]
    return {"step": progress.step, "score": progress.score, "seconds": progress.seconds, "cause": cause}


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*TABLE, box=None, pad_edge=False)
    for row in rows:
        # Workers that do not answer report neither memory nor traffic.
        traffic = row.get("traffic")
        sent = [f"{traffic[way] / 1e6:.1f}" for way in ("bytes_sent", "bytes_received")] if traffic else ["", ""]
        sent.append(", ".join(_by_lane(traffic)) if traffic else "")
        cells = [row[column] for column in ("name", "pid", "host", "state", "step", "version")]
        table.add_row(*("" if cell is None else str(cell) for cell in (*cells, row.get("memory_mb"), *sent)))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def _by_lane(traffic: dict[str, Any]) -> Iterator[str]:
    """What a worker has sent by each lane that it uses."""
    for lane, sent in traffic["lanes"].items():
        if sent["messages"]:
            yield f"{lane} {sent['bytes'] / 1e6:.1f}"


@click.command()
@click.argument("run", required=False)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def watch(run: str | None, runs_dir: Path) -> int:
    """Show the progress of RUN (default: the newest) until it is over; Ctrl-C stops watching, not the run.

    Returns the exit code of the run.
    """
    from distflow.launch.deploy.monitor import Monitor
    from distflow.launch.deploy.multi_host import latest_record
    from distflow.launch.observe.progress import make_display
    from distflow.launch.observe.run_summary import tell_end
    from distflow.launch.run.folder import find_run, run_word

    run_dir = find_run(run, runs_dir)
    first = latest_record(run_dir)
    try:
        record = Monitor(run_dir, make_display(first.training_steps)).only_look()
    except KeyboardInterrupt:
        click.echo(f"no longer watching; {first.name} continues — `distflow stop {run_word(first.path)}` ends it")
        return 0
    return tell_end(record, runs_dir)


@click.command()
@click.argument("run", required=False)
@click.option("--worker", help="Only this worker, for example rollout/0.")
@click.option("--all", "everything", is_flag=True, help="All threads, not only those in your code or in the script.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def stacks(run: str | None, worker: str | None, everything: bool, runs_dir: Path) -> None:
    """Show where RUN's workers (default: the newest) are in your code and in the script, and what each waits for."""
    from distflow.errors import UserError
    from distflow.launch.deploy.multi_host import latest_record
    from distflow.launch.observe.run_client import stacks_of
    from distflow.launch.run.folder import find_run

    record = latest_record(find_run(run, runs_dir))
    names = [entry.name for entry in record.workers]
    if worker is not None and worker not in names:
        raise UserError(f"--worker {worker}: {record.name} has no such worker — there are: {', '.join(names)}")
    for found in stacks_of(record, names if worker is None else [worker], everything=everything):
        process = "" if found.pid is None else f" (pid {found.pid})"
        click.echo(f"{found.worker}{process} {found.note}")
        for line in found.text.splitlines():
            click.echo(f"    {line}")
