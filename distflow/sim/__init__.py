"""The simulator: the project's own cores in virtual time, the latency of devices, and the theory of step times.

Nothing here knows a socket, a clock or a process. Latency and length models are shared with the emulated engines of
`distflow.testing.emulated`, so that what is simulated can be run and compared.
"""
