"""The plan as a picture: pools side by side, and a line below them for all that one gives another.

Like a sequence diagram: whatever the graph is, no two lines cross and every text has room. The picture has its own
background and follows the reader's choice of light or dark. Lengths are pixels; text is measured by its letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from distflow.flow.edges import Edge, EdgeKind
from distflow.flow.graph_text import lane_text, uses
from distflow.flow.lanes import ONE_HOST, Whereabouts
from distflow.flow.plan import Plan, PoolPlan

PAD, GAP, TOP = 28, 44, 84
LETTER = 6.0
"""Width of a letter of the small text."""
BOX_LETTERS = 30
LINE, ROW = 15, 26
"""Heights: of a line of small text, and of what stands between two edges."""
LEAST_SPAN = 340
"""Between the middles of two pools beside each other: their edges' fields stand in between."""
LOOP = 46
"""Width of the loop of an edge from a pool to itself."""
STACK, MOST_STACKED = 5, 3
"""A pool of several workers is drawn as so many sheets at most, so far apart."""
STYLE = """
svg { color-scheme: light dark; }
text { font: 12px ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2933; }
.card { fill: #ffffff; stroke: #d9dee5; }
.box { fill: #f4f6f9; stroke: #9aa5b4; }
.life { stroke: #c6cdd6; stroke-dasharray: 2 4; }
.title { font-size: 17px; font-weight: 650; }
.name { font-size: 14.5px; font-weight: 650; }
.edge { font-size: 12.5px; font-weight: 600; }
.small { font-size: 11px; font-weight: 400; fill: #65717f; }
.behind { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }
.line { fill: none; stroke-width: 1.8; }
.lease { stroke: #2f6fd0; } .call { stroke: #8250c8; } .rows { stroke: #218a55; } .weights { stroke: #d9822b; }
.client { stroke: #c2416b; } .head-client { fill: #c2416b; }
.weights, .back { stroke-dasharray: 6 4; }
.head-lease { fill: #2f6fd0; } .head-call { fill: #8250c8; } .head-rows { fill: #218a55; }
.head-weights { fill: #d9822b; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf0; }
  .card { fill: #161b22; stroke: #333b46; }
  .box { fill: #212934; stroke: #56616f; }
  .life { stroke: #3d4754; }
  .small { fill: #98a4b3; }
  .behind { stroke: #161b22; }
}
"""
_KINDS: Mapping[EdgeKind, str] = {
    "lease": "groups of its leases",
    "call": "asks for a step",
    "client": "written by clients",
    "rows": "rows to train on",
    "weights": "weights",
}


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the pools stand."""

    middles: Mapping[str, float]
    width: float
    """Of a box."""
    page: float


def render_svg(plan: Plan, where: Whereabouts = ONE_HOST) -> str:
    """An SVG document; `where`: where the workers are."""
    columns = _columns(plan)
    box_height = 52 + LINE * max(len(_box_lines(pool)) for pool in plan.pools)
    edges, bottom = _edges(plan, columns, TOP + box_height + ROW, where)
    height = bottom + PAD - ROW / 2
    life = [
        f'<line class="life" x1="{x:.1f}" y1="{TOP + box_height}" x2="{x:.1f}" y2="{height - PAD / 2:.1f}"/>'
        for x in columns.middles.values()
    ]
    boxes = [line for pool in plan.pools for line in _box(pool, columns, box_height)]
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns.page:.0f} {height:.0f}" '
        f'width="{columns.page:.0f}" height="{height:.0f}" role="img">',
        f"<title>{escape(f'Plan of the run {plan.run_name}')}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{columns.page - 1:.0f}" height="{height - 1:.0f}" rx="12"/>',
        *_header(plan),
        *life,
        *boxes,
        *edges,
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _columns(plan: Plan) -> _Columns:
    lines = [line for pool in plan.pools for line in [f"{pool.name:>{len(pool.name) + 8}}", *dict(_box_lines(pool))]]
    width = max(150.0, 26 + (LETTER + 0.4) * max(map(len, lines)))
    span = max(LEAST_SPAN, width + GAP)
    header = max(1.7 * LETTER * len(plan.run_name), *((LETTER + 0.2) * len(line) for line in _header_lines(plan)))
    # A pool's edges to itself are written at its right.
    right = LEAST_SPAN - width / 2 if any(edge.source == edge.target for edge in plan.edges) else 0.0
    pools = width + span * (len(plan.pools) - 1) + right
    page = 2 * PAD + max(pools, header)
    first = (page - pools) / 2 + width / 2
    middles = {pool.name: first + span * number for number, pool in enumerate(plan.pools)}
    return _Columns(middles, width, page)


def _header_lines(plan: Plan) -> list[str]:
    batch = plan.batch
    size = f"{batch.prompts} prompts × {batch.samples_per_prompt} samples a training step"
    age = "of any age" if batch.max_staleness is None else f"at most {batch.max_staleness} version(s) old"
    models = ", ".join(f"{one.name} ({'frozen' if one.home is None else 'trained'})" for one in plan.models)
    return [f"{size}, {batch.training_steps} training steps; samples {age}", f"models: {models}"]


def _header(plan: Plan) -> Iterator[str]:
    yield _text(PAD, 32, plan.run_name, "title")
    for number, line in enumerate(_header_lines(plan)):
        yield _text(PAD, 51 + LINE * number, line, "small")


def _box_lines(pool: PoolPlan) -> list[tuple[str, str]]:
    """What a box says below the pool's name and its workers, with the style of each line."""
    return [*((line, "") for line in _wrapped(pool.steps, BOX_LETTERS)), *((line, "small") for line in uses(pool))]


def _box(pool: PoolPlan, columns: _Columns, height: float) -> Iterator[str]:
    """A sheet for each worker, up to three; the steps and models on the front one."""
    left, middle = columns.middles[pool.name] - columns.width / 2, columns.middles[pool.name]
    for sheet in reversed(range(min(pool.count, MOST_STACKED))):
        at = f'x="{left + sheet * STACK:.1f}" y="{TOP - sheet * STACK}"'
        yield f'<rect class="box" {at} width="{columns.width:.1f}" height="{height}" rx="8"/>'
    yield _text(middle, TOP + 24, pool.name, "name", "middle")
    yield _text(middle, TOP + 39, f"{pool.count} worker{'s' if pool.count > 1 else ''}", "small", "middle")
    for number, (line, style) in enumerate(_box_lines(pool)):
        yield _text(middle, TOP + 58 + LINE * number, line, style, "middle")


def _edges(plan: Plan, columns: _Columns, top: float, where: Whereabouts) -> tuple[list[str], float]:
    """The lines of the picture, and where they end."""
    found: list[str] = []
    y = top
    for edge in plan.edges:
        kind = f"  {_KINDS[edge.kind]}, {lane_text(plan, edge, where)}"
        drawn, y = (_loop if edge.source == edge.target else _arrows)(edge, kind, columns, y)
        found += drawn
        y += ROW
    return found, y


def _arrows(edge: Edge, kind: str, columns: _Columns, y: float) -> tuple[list[str], float]:
    """An arrow with what goes along below it; for a call another one with what comes back."""
    begin, end = columns.middles[edge.source], columns.middles[edge.target]
    middle, letters = (begin + end) / 2, int((abs(end - begin) - 24) / LETTER)
    y += LINE
    lines = [_text(middle, y - 7, f"{edge.name}", "edge behind", "middle", kind)]
    lines += _arrow(begin, end, y, edge.kind)
    lines, y = _below(lines, _wrapped(edge.fields, letters), middle, y, "middle")
    if edge.back:
        y += 12
        lines += _arrow(end, begin, y, edge.kind, "back")
        lines, y = _below(lines, _wrapped(edge.back, letters), middle, y, "middle")
    return lines, y


def _loop(edge: Edge, kind: str, columns: _Columns, y: float) -> tuple[list[str], float]:
    """From a pool to itself: its parts take turns."""
    x = columns.middles[edge.source]
    right, letters = x + LOOP + 14, int((columns.page - PAD - x - LOOP - 14) / LETTER)
    path = f"M {x:.1f} {y:.1f} h {LOOP - 8} q 8 0 8 8 v 10 q 0 8 -8 8 H {x + 7:.1f}"
    lines = [f'<path class="line {edge.kind}" d="{path}"/>', _head(x, y + 26, -1, edge.kind)]
    lines.append(_text(right, y + 8, edge.name, "edge", "start", kind))
    lines, below = _below(lines, _wrapped((*edge.fields, *edge.back), letters), right, y + 8, "start")
    return lines, max(below, y + 26)


def _below(lines: list[str], texts: Sequence[str], x: float, y: float, anchor: str) -> tuple[list[str], float]:
    new = [_text(x, y + LINE * (number + 1), line, "small behind", anchor) for number, line in enumerate(texts)]
    return [*lines, *new], y + LINE * len(texts) + 4


def _arrow(begin: float, end: float, y: float, kind: EdgeKind, more: str = "") -> list[str]:
    way = 1 if end > begin else -1
    line = f'<line class="line {kind} {more}" x1="{begin:.1f}" y1="{y:.1f}" x2="{end - 7 * way:.1f}" y2="{y:.1f}"/>'
    return [line, _head(end, y, way, kind)]


def _head(x: float, y: float, way: int, kind: EdgeKind) -> str:
    back = x - 9 * way
    return f'<path class="head-{kind}" d="M {x:.1f} {y:.1f} L {back:.1f} {y - 4.5:.1f} L {back:.1f} {y + 4.5:.1f} Z"/>'


def _wrapped(words: Iterable[str], letters: int) -> list[str]:
    """Words with commas between, in lines of so many letters."""
    lines = [""]
    for number, word in enumerate(words):
        joined = f"{lines[-1]}, {word}" if lines[-1] else word
        if number and len(joined) > letters:
            lines[-1] += ","
            lines.append(word)
        else:
            lines[-1] = joined
    return [line for line in lines if line]


def _text(x: float, y: float, text: str, style: str, anchor: str = "start", more: str = "") -> str:
    after = f'<tspan class="small" xml:space="preserve">{escape(more)}</tspan>' if more else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}{after}</text>'
