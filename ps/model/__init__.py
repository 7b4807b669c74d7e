"""Weights, gradients and passes: torch, but no process, no socket and no thread.

Here: the store of the weights, the optimizer, one buffer for all tensors, how a forward pass is
run, seeds, devices, messages as bytes.
Not here: who computes when, or where. Imports ps.protocol, ps.workload, ps.host, ps.settings.
"""
