"""How every engine must free its device: the part of `engine_contract` about `offload`."""

from __future__ import annotations

from distflow.testing.engine_continuation import NEWER, ContinuationContract
from distflow.testing.engine_harness import by_sample, run_until_done, submit


class OffloadContract(ContinuationContract):
    """Mixed into `EngineContract`."""

    def test_offload_in_mid_sample_changes_nothing(self) -> None:
        """Running samples survive it."""
        engine = self.ready()
        request = self.request(5, max_new_tokens=6)
        submit(engine, [request])
        engine.poll()
        engine.offload()
        engine.onload()
        for output in run_until_done(engine):
            self.check(request, output)

    def test_torn_weights_come_anew_and_running_samples_go_on(self) -> None:
        """An update that begins before the offload may be repeated and completed after it."""
        runs = []
        for away in (False, True):
            engine = self.ready(max_tokens=self.longest + 8)
            submit(engine, [self.request(p, max_new_tokens=self.longest) for p in (2, 5)])
            engine.poll()
            engine.poll()
            engine.begin_update(NEWER)
            if away:
                engine.offload()
                engine.onload()
            assert engine.version is None
            self.load(engine, 1, NEWER)
            runs.append(by_sample(run_until_done(engine)))
        assert runs[0].keys() == runs[1].keys()
        assert all(
            len(out.token_ids) == self.longest and out.spans[-1].version == NEWER.number for out in runs[1].values()
        )
        if self.exact:
            assert runs[0] == runs[1]

    def test_an_engine_that_is_away_can_go_without_samples(self) -> None:
        """With nothing running, onload restores an empty engine, which takes samples as usual."""
        engine = self.ready()
        submit(engine, [self.request(1, max_new_tokens=3)])
        run_until_done(engine)
        engine.offload()
        engine.onload()
        request = self.request(4, max_new_tokens=9)
        submit(engine, [request])
        for output in run_until_done(engine):
            self.check(request, output)
