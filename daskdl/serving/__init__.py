"""Models that answer calls: joined into batches, spread over replicas.

=================  =========================================================
`calls`            one call: checked, and what it waits for
`joining`          which calls leave together, and when
`crowd`            whether more calls are to be waited for
`room`             how many may wait
`answers`          what comes back, cut into each caller's own
`resident`         a model in memory, and the thread that computes with it
`replica`          what a place that answers must provide
`local`, `remote`  a thread of this process; a worker, seen from the client
`worker`           the other end of `remote`
`crew`             as many replicas as asked for, all with one model
`dispatcher`       calls to replicas, answers to callers
`predictor`        the public face
=================  =========================================================
"""
