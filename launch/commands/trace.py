"""`distflow trace`: a timeline of all workers in Chrome's JSON format, for Perfetto.

It is merged from the workers' `trace/*.jsonl` (see `distflow/runtime/trace_writer.py`): a process for each worker, a
row for each of its threads, arrows from the groups sent to where they were taken for training and from published
weights to where they were loaded, curves for counters.

Clocks: events of one host share its wall clock. Between hosts it is corrected by the flows: a receive may never precede
its send, so the smallest delay seen from host a to host b, as the clocks show it, bounds the difference of their clocks
from one side, and the smallest one from b to a from the other; the middle is taken where both are known. With flows one
way only, a clock is moved only if it is impossible as it is, and only as far as necessary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from distflow.config.outputs import cannot_write
from distflow.errors import UserError
from distflow.types import WorkerName

Event = dict[str, Any]
STEP = "step"
"""Category of the spans that cover one training step each."""
Delay = tuple[int, int, float]
"""Sender's host, receiver's host, and the time from sending to receiving as their two clocks show it."""


@click.command()
@click.argument("run", required=False)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write, *.json."
)
@click.option("--last", type=click.IntRange(min=1), help="Only the last N training steps.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, output: Path, last: int | None, runs_dir: Path) -> None:
    """Merge the traces of RUN's workers (default: the newest) into one file that Perfetto and Chrome open."""
    from distflow.launch.run.folder import find_run

    run_dir = find_run(run, runs_dir)
    trace = merged_trace(run_dir, last)
    write_trace(output, trace)
    events = trace["traceEvents"]
    spans, arrows = (sum(event["ph"] == kind for event in events) for kind in "Xs")
    workers = sum(event["name"] == "process_name" for event in events)
    click.echo(f"{output}: {spans} spans and {arrows} arrows of {workers} workers — open it at ui.perfetto.dev")
    dropped = trace["otherData"]["events dropped"]
    if dropped:
        click.echo(f"{dropped} events are missing: they were recorded faster than they could be written", err=True)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Times in µs."""

    name: str
    category: str
    thread: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class FlowEnd:
    """One end of an arrow. `worker`: at the head, the sender (empty: unknown); at the tail, the worker itself."""

    kind: str
    id: str
    worker: str
    thread: int
    at: float


@dataclass(slots=True)
class Track:
    """What one worker recorded, over all of its restarts."""

    worker: str
    host: int = 0
    pids: list[int] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    spans: list[TraceSpan] = field(default_factory=list)
    sent: list[FlowEnd] = field(default_factory=list)
    taken: list[FlowEnd] = field(default_factory=list)
    counts: list[tuple[str, float, float]] = field(default_factory=list)
    dropped: int = 0
    """Events that did not fit into the queue of the worker."""
    malformed: int = 0
    """Lines cut off when the worker was killed."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """From one worker's tail to another's head."""

    tail_of: str
    tail: FlowEnd
    head_of: str
    head: FlowEnd


def write_trace(output: Path, trace: Mapping[str, Any]) -> None:
    """Write it; raises UserError where that cannot be done."""
    try:
        output.write_text(json.dumps(trace, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise cannot_write("-o", output, error) from error


def tracks_trace(tracks: Sequence[Track], about: Mapping[str, Any]) -> dict[str, Any]:
    """A trace of these tracks, whose clocks agree and which have nothing but spans and counters."""
    events = [event for number, track in enumerate(tracks, 1) for event in _track_events(track, number)]
    timed = [event for number, track in enumerate(tracks, 1) for event in _timed_events(track, number, 0.0)]
    ordered = sorted(timed, key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {"traceEvents": events + ordered, "displayTimeUnit": "ms", "otherData": about}


def merged_trace(run_dir: Path, last: int | None) -> dict[str, Any]:
    """The whole trace of a run, or of its `last` training steps; raises UserError if nothing was recorded."""
    tracks = read_tracks(run_dir)
    if not tracks:
        raise UserError(
            f"{run_dir}/trace: no trace of this run — it records one unless it was launched with run.trace=false"
        )
    arrows = _arrows(tracks)
    shift = _shifts(tracks, arrows)
    begin = min((span.begin + shift[track.worker] for track in tracks for span in track.spans), default=0.0)
    window = _beginning(tracks, shift, last) if last is not None else begin
    events = [event for number, track in enumerate(tracks, 1) for event in _track_events(track, number)]
    numbers = {track.worker: number for number, track in enumerate(tracks, 1)}
    timed = [event for track in tracks for event in _timed_events(track, numbers[track.worker], shift[track.worker])]
    timed += _arrow_events(arrows, numbers, shift, window)
    timed = [_placed(event, window) for event in timed if _end(event) >= window]
    return {
        "traceEvents": events + sorted(timed, key=lambda event: (event["ts"], -event.get("dur", 0.0))),
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run_dir.name,
            "events dropped": sum(track.dropped for track in tracks),
            "lines cut off": sum(track.malformed for track in tracks),
            "clock corrections in µs": {track.worker: round(shift[track.worker], 3) for track in tracks},
        },
    }


def read_tracks(run_dir: Path) -> list[Track]:
    """One track per worker, training workers first; times count from the first trace file found."""
    tracks: dict[str, Track] = {}
    origin: int | None = None
    # The previous file of a worker comes first: `x.before.jsonl` < `x.jsonl`.
    for path in sorted((run_dir / "trace").glob("*.jsonl")):
        origin = _read_file(path, tracks, origin)
    return sorted(tracks.values(), key=_order)


def _order(track: Track) -> tuple[bool, str, int]:
    name = WorkerName.parse(track.worker)
    return all(span.category != STEP for span in track.spans), name.pool, name.index


def _read_file(path: Path, tracks: dict[str, Track], origin: int | None) -> int | None:
    track, base, malformed = None, 0.0, 0
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            malformed += 1
            continue
        if isinstance(line, dict):
            track = tracks.setdefault(line["worker"], Track(line["worker"], line["host"]))
            track.pids += [line["pid"]] if line["pid"] not in track.pids else []
            origin = line["began_us"] if origin is None else origin
            base = float(line["began_us"] - origin)
        elif track is not None:
            _read_line(track, line, base)
    if track is not None:
        track.malformed += malformed
    return origin


def _read_line(track: Track, line: Sequence[Any], base: float) -> None:
    match line:
        case ["X", name, category, thread, begin, duration]:
            track.spans.append(TraceSpan(name, category, thread, base + begin, base + begin + duration))
        case ["s", kind, thread, at, ids]:
            track.sent += [FlowEnd(kind, each, track.worker, thread, base + at) for each in ids]
        case ["f", kind, thread, at, ids, workers]:
            origins = workers or [""] * len(ids)
            track.taken += [FlowEnd(kind, i, w, thread, base + at) for i, w in zip(ids, origins, strict=True)]
        case ["C", name, at, value]:
            track.counts.append((name, base + at, value))
        case ["T", thread, name]:
            track.threads[thread] = name
        case ["D", _, count]:
            track.dropped = count


def _arrows(tracks: Iterable[Track]) -> list[Arrow]:
    """Each head with the newest tail before it that has its id and, if it is known, its worker.

    Where clocks differ and every tail seems to come later, with the first of them.
    """
    tails: dict[tuple[str, str, str], list[FlowEnd]] = {}
    for track in tracks:
        for tail in track.sent:
            for origin in (tail.worker, ""):
                tails.setdefault((tail.kind, tail.id, origin), []).append(tail)
    found = []
    for track in tracks:
        for head in track.taken:
            key = head.kind, head.id, head.worker
            if key not in tails:
                continue
            before = [tail for tail in tails[key] if tail.at <= head.at]
            tail = max(before, key=lambda each: each.at) if before else min(tails[key], key=lambda each: each.at)
            found.append(Arrow(tail.worker, tail, track.worker, head))
    return found


def _shifts(tracks: Sequence[Track], arrows: Iterable[Arrow]) -> dict[str, float]:
    """µs to add to the times of each worker."""
    hosts = {track.worker: track.host for track in tracks}
    delays: list[Delay] = [(hosts[a.tail_of], hosts[a.head_of], a.head.at - a.tail.at) for a in arrows]
    found = corrections(sorted(set(hosts.values())), delays)
    return {worker: found[host] for worker, host in hosts.items()}


def _beginning(tracks: Iterable[Track], shift: Mapping[str, float], last: int) -> float:
    """When the first of the last training steps began, on whichever worker was first."""
    steps: dict[str, float] = {}
    for track in tracks:
        # A run that was resumed trains some steps again: the newest time counts.
        newest = {
            span.name: span.begin for span in sorted(track.spans, key=lambda each: each.begin) if span.category == STEP
        }
        for name, begin in newest.items():
            placed = begin + shift[track.worker]
            steps[name] = min(placed, steps.get(name, placed))
    if not steps:
        raise UserError("--last: no training step is finished yet — leave it out")
    return sorted(steps.values())[-last:][0]


def _track_events(track: Track, number: int) -> list[Event]:
    """Names and order of a worker and its threads."""
    common = {"ph": "M", "ts": 0, "pid": number}
    label = f"{track.worker} (host {track.host}, pid {', '.join(map(str, track.pids))})"
    events = [
        {**common, "tid": 0, "name": "process_name", "args": {"name": label}},
        {**common, "tid": 0, "name": "process_sort_index", "args": {"sort_index": number}},
    ]
    for thread, name in sorted(track.threads.items()):
        events.append({**common, "tid": thread, "name": "thread_name", "args": {"name": name}})
        events.append({**common, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
    return events


def _timed_events(track: Track, number: int, shift: float) -> list[Event]:
    common = {"pid": number}
    events: list[Event] = []
    for span in nested(track.spans):
        times = {"ts": span.begin + shift, "dur": span.end - span.begin}
        events.append({**common, "ph": "X", "tid": span.thread, "name": span.name, "cat": span.category, **times})
    for name, at, value in track.counts:
        events.append({**common, "ph": "C", "tid": 0, "name": name, "ts": at + shift, "args": {"value": value}})
    return events


def nested(spans: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Spans of one thread either contain each other or are apart: one that reaches out of another is cut off there.

    That happens only where a span was left open across a `yield`.
    """
    out: list[TraceSpan] = []
    ends: dict[int, list[float]] = {}
    for span in sorted(spans, key=lambda each: (each.begin, -each.end)):
        stack = ends.setdefault(span.thread, [])
        while stack and stack[-1] <= span.begin:
            stack.pop()
        end = min(span.end, stack[-1]) if stack else span.end
        stack.append(end)
        out.append(TraceSpan(span.name, span.category, span.thread, span.begin, end))
    return out


def _arrow_events(
    arrows: Iterable[Arrow], numbers: Mapping[str, int], shift: Mapping[str, float], window: float
) -> list[Event]:
    """Both ends of each arrow that begins within the window."""
    events: list[Event] = []
    for number, arrow in enumerate(arrows, 1):
        begin, end = arrow.tail.at + shift[arrow.tail_of], arrow.head.at + shift[arrow.head_of]
        if begin < window:
            continue
        name = f"{arrow.tail.kind} {arrow.tail.id}"
        common = {"cat": arrow.tail.kind, "name": name, "id": number}
        tail = {"pid": numbers[arrow.tail_of], "tid": arrow.tail.thread, "ts": begin}
        head = {"pid": numbers[arrow.head_of], "tid": arrow.head.thread, "ts": max(begin, end), "bp": "e"}
        events += [{**common, "ph": "s", **tail}, {**common, "ph": "f", **head}]
    return events


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"]) if "dur" in event else float(event["ts"])


def _placed(event: Event, begin: float) -> Event:
    """In µs since the trace's beginning; a span that began earlier is cut off there."""
    start = max(0.0, round(event["ts"] - begin, 3))
    if "dur" not in event:
        return {**event, "ts": start}
    return {**event, "ts": start, "dur": round(_end(event) - begin - start, 3)}


def corrections(hosts: Sequence[int], delays: Iterable[Delay]) -> dict[int, float]:
    """What to add to each host's times so that nothing is received before it was sent; the first host's stay.

    If delays contradict each other (a clock was set in between), some remain negative.
    """
    least: dict[tuple[int, int], float] = {}
    for sender, receiver, delay in delays:
        if sender != receiver:
            least[sender, receiver] = min(delay, least.get((sender, receiver), delay))
    found = _centred(hosts, least)
    # Pairs that the walk did not go along may be violated still: move receivers, as far as necessary. Each round
    # settles the chains that are one message longer (Bellman and Ford's longest paths).
    for _ in hosts:
        for (sender, receiver), delay in least.items():
            found[receiver] = max(found[receiver], found[sender] - delay)
    return {host: shift - found[hosts[0]] for host, shift in found.items()}


def _centred(hosts: Sequence[int], least: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Walk from the first host along the messages; each host is placed relative to where it was reached from."""
    found: dict[int, float] = {}
    for start in hosts:
        if start in found:
            continue
        found[start] = 0.0
        front = [start]
        while front:
            here = front.pop(0)
            for there in hosts:
                if there not in found and ((here, there) in least or (there, here) in least):
                    found[there] = found[here] + _between(least, here, there)
                    front.append(there)
    return found


def _between(least: Mapping[tuple[int, int], float], here: int, there: int) -> float:
    """Correction of `there` relative to `here`: the middle of what the two directions allow, or nearest to 0."""
    low = -least[here, there] if (here, there) in least else -math.inf
    high = least.get((there, here), math.inf)
    return (low + high) / 2 if math.isfinite(low + high) else min(max(0.0, low), high)
