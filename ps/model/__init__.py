"""Weights, gradients and passes: torch, but no process, no socket and no thread.

Here: the store of the weights and its snapshots, the optimizer, gradients, one buffer for all
tensors, how a forward pass is run, devices, messages as bytes, and all that is drawn at random.
Not here: who computes when, or where. Imports ps.protocol, ps.workload, ps.host, ps.settings.
"""
