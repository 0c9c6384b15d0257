"""What the reports of all hosts say together, kept up to date: whatever has changed is counted anew, nothing else.

Example: of 4,096 hosts one reports that its last worker runs. `look` takes its former report out of the totals and puts
the new one in; the other 4,095 are not looked at.
"""

from __future__ import annotations

from collections import Counter

from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import HostReport


class ReportTotals:
    """Of one agent's mesh. `look` brings it up to date; the sets contain numbers of other hosts."""

    def __init__(self, mesh: Gossip) -> None:
        self.mesh = mesh
        self.idle: set[int] = set()
        """On these no worker runs or will run."""
        self.starting: set[int] = set()
        """On these a worker has not been started yet."""
        self.ending: set[int] = set()
        """These wind up because something failed, or because they were told to."""
        self.at_once: set[int] = set()
        """These wind up without waiting for anything to be saved."""
        self.saved = 0
        """Bytes of checkpoints that workers there have read or written since the run is ending."""
        self._terms: Counter[tuple[int, bool]] = Counter()
        self._counted: dict[int, HostReport] = {}
        self._revision = mesh.revision
        for host in mesh.reports:
            self._count(host)

    @property
    def between_terms(self) -> bool:
        """Whether the newest term that any host, ours included, reports is broken: no training worker runs then."""
        return max(self._terms)[1]

    @property
    def all_started(self) -> bool:
        """Whether all hosts have reported, and all workers of the others have been started."""
        return len(self._counted) > len(self.mesh.others) and not self.starting

    def look(self) -> None:
        """Count what has changed."""
        for host in self.mesh.changed_since(self._revision):
            self._count(host)
        self._revision = self.mesh.revision

    def _count(self, host: int) -> None:
        report, before = self.mesh.report(host), self._counted.get(host)
        if report is None:
            return
        self._counted[host] = report
        self._terms[_term(report)] += 1
        if before is not None:
            self._terms[_term(before)] -= 1
            if not self._terms[_term(before)]:
                del self._terms[_term(before)]
        if host == self.mesh.host:
            return
        self.saved += report.saved - (0 if before is None else before.saved)
        winds_up = report.at_once or report.phase in ("failing", "stopping")
        starts = any(hosted.state == "starting" for hosted in report.workers.values())
        _put(host, self.idle, report.gone or not report.living)
        _put(host, self.starting, starts)
        _put(host, self.ending, winds_up)
        _put(host, self.at_once, report.at_once)


def _term(report: HostReport) -> tuple[int, bool]:
    return report.term.number, report.term.broken


def _put(host: int, hosts: set[int], is_so: bool) -> None:
    if is_so:
        hosts.add(host)
    else:
        hosts.discard(host)
