"""How the replicas of one fit reach each other: updates, work, barriers and payloads.

A replica sees one object, :class:`~daskdl.channel.base.Channel`, with bounded waits. It
publishes frames, drains what others have published, leases work and meets the others at
barriers. Behind it lie the scheduler plugin that holds the state of the run
(:mod:`~daskdl.channel.run_state` decides, without I/O), the event loop's end of each
replica, relay and mesh routing, retransmission and agreement after losses.
:mod:`~daskdl.channel.local` is the same for threads of one process.
"""
