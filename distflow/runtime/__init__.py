"""Runs one worker's script: steps, engines and backends by protocol, metrics, checkpoints, waits.

Threads of a worker. The script runs on the main thread; the others serve it. *The board* is the `WaitBoard` of
`waits.py`; its lock guards the cores of leases, membership and weights.

| thread (where it starts)               | does                                 | waits for / unblocked by             |
| -------------------------------------- | ------------------------------------ | ------------------------------------ |
| main (main.py)                         | the script: steps, engine, training  | the board, under a name: endpoint,   |
|                                        |                                      | prompts, weights, checkpoint, a stop |
| episodes (episode_loop.py; or two for  | generate steps, as coroutines; or    | what steps await; their pipes        |
| their process, episode_process.py)     | what is posted to them, and heard    |                                      |
| episode (episode_loop.py)              | a generate step that is no coroutine | a request's answer                   |
| endpoint (comm/endpoint.py)            | owns all sockets; runs the handlers  | sockets: peers; its outbox: posts    |
|                                        | of messages and of ticks             | from any thread                      |
| prompts (exchange/prompt_reader.py)    | data source and tokenizer, ahead     | its own condition: `prompt_at`       |
| weights (weights/prefetch.py; readers  | fetches and checks a version, then   | its own condition: an announcement,  |
| on hosts without a publisher)          | wakes the board                      | on the endpoint's thread             |
| swarm-serve, -requests, -chunks        | chunks of weights for other hosts,   | sockets: readers; a queue: requests  |
| (weights/swarm/chunk_server.py;        | two for each connection              |                                      |
| publishers and readers)                |                                      |                                      |
| weights-sums, swarm-describe           | checksums or digests of a version,   | a queue: `publish`                   |
| (weights/swarm/announcing.py)          | then announces it                    |                                      |
| weights-memory (weights/segments/)     | reserves it for versions to come     | nothing                              |
| swarm-fetch (weights/swarm/link.py)    | receives and checks chunks           | a socket: publisher, other readers   |
| consumers (disk.py)                    | lists clients' lossless consumers    | its own condition: an ask            |
| checkpoint, model folders              | parts and COMMIT; Hugging Face       | a queue: `save`                      |
| (checkpoint/writer_thread.py)          | folders                              |                                      |
| copies (workers/second_place.py)       | checkpoints to `run.copy_to`         | a condition: a new checkpoint        |
| dumps (dumps.py; trace_writer.py)      | rollout dumps; trace events          | a queue: `receive`; a timer          |
| trackers (comm/tracker_processes.py)   | watches the trackers' processes      | their pipes; a timer                 |
| sglang log (workers/engines)           | repeats what SGLang's process says   | its pipe                             |

Who holds which lock: the endpoint's thread holds the board's while a handler runs, so handlers change state, decode
what came and encode small answers to clients (some 0.3 ms a MiB), and never wait; once all that came together is
handled, it wakes who waits. The main thread takes it to change the same
state, and releases it while it waits. Other locks (prompts, weights, outbox, metrics, trace, disk, segments) are held
for a few lines each; no thread takes the board's while it holds one of them.

A user's code runs on the main thread (steps, and rows that are held out), on the prompts thread (data source,
tokenizer) and in processes of its own (rewards, `workers/reward_pool.py`), never under a lock.
"""
