"""The algorithm on the other ranks: ask, load, compute, hand in.

Here: a trainer's loop, the work on one order, the batches it needs.
Not here: where the server is. Imports ps.model and what lies below it; meets the server in
ps.protocol.
"""
