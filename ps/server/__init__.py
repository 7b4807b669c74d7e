"""The algorithm on rank 0: what is to be done, who may do it, what becomes of what they did.

Here: an order, a way to pace, a count in the report, who is present, how an update is made.
Not here: how a call gets here (ps.links), what a trainer does with an order (ps.trainer), files.
Imports ps.model and what lies below it.
"""
