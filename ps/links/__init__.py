"""How ranks reach each other. The only door to torch.distributed, and to other ranks.

Here: a link, the rendezvous of all ranks, shared memory, data that is there once per host.
Not here: what the calls mean (ps.protocol, ps.server). Imports ps.server, ps.trainer and what lies
below them.
"""
