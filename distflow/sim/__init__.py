"""The simulator: the project's own cores in virtual time, the latency of devices, and the theory of step times.

Nothing here knows a socket, a clock or a process, but for `profiling.py`, which measures the latencies of this machine.
Latency and length models are shared with the emulated engines of `distflow.testing.emulated`, so that what is simulated
can be run and compared.

`network.py` connects the cores of owners (`trainer.py`) and holders (`worker.py`); a `scenario.py` says what happens to
them, a `workload.py` what they have to do, and `predict.py` reads off what came of a plan. The search for faults of
`tests/search` extends the network, and audits every message and token.
"""
