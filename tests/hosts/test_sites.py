"""Training over two sites, joined by a link of 50 Mbit/s on which everything takes 50 ms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.flow.recipe_check import plan_recipe
from distflow.flow.sizes import model_size
from tests.e2e.runs import SMALL
from tests.hosts.conftest import Cluster, reason
from tests.hosts.netns import NetHosts
from tests.hosts.slow_link import TUN, SiteLink
from tests.hosts.test_hosts_e2e import hosts_file
from tests.hosts.test_training_on_hosts import await_end, await_steps, check_exactly_once, folders_of

STEPS = 20
SLOW = SiteLink(50e6, 0.05)
PLACES = [
    "layout=async",
    "layout.pools.trainer.hosts=[h0]",
    "layout.pools.rollout.hosts=[h1, h2]",
    "layout.pools.rollout.count=2",
]


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Cluster]:
    """Host 0, and far away 1 and 2."""
    if (why := reason()) is not None:
        pytest.skip(why)
    if not Path(TUN).exists():
        pytest.skip(f"needs {TUN} for the link between the sites")
    with NetHosts(3, tmp_path, far=(1, 2), link=SLOW) as net:
        yield Cluster(net, tmp_path)


def test_weights_cross_between_sites_once_and_samples_compressed(sites: Cluster) -> None:
    lines = ["h0 slots=1", "h1 slots=1 site=far", "h2 slots=1 site=far"]
    before = sites.net.crossed()
    head = sites.start(hosts_file(sites, *lines, shared=True), f"run.training_steps={STEPS}", *SMALL, *PLACES)
    await_steps(sites, head, 5)
    status = sites.distflow("status", "quickstart", "--json", "--runs-dir", str(sites.runs_dir))
    sent = {one["name"]: one["traffic"]["lanes"] for one in json.loads(status.stdout)["workers"]}
    out, err = head.communicate(timeout=180)
    assert head.returncode == 0, f"{out}\n{err}"
    check_exactly_once(folders_of(sites), STEPS)
    assert sent["rollout/0"]["zstd"]["messages"] + sent["rollout/1"]["zstd"]["messages"] > 0
    size = model_size(plan_recipe("quickstart", [])[1].recipe.models["policy"])
    assert size is not None
    to_them = sites.net.crossed()[0] - before[0]
    assert size.published < to_them < size.published * STEPS * 1.5, "each version, once for the two hosts there"
    await_end(sites)
