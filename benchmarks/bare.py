"""The least a torchrun program with RPC does: import torch, open RPC, close it."""

from __future__ import annotations

import os
import warnings

warnings.filterwarnings("ignore")
os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}

import torch.distributed.rpc as rpc  # noqa: E402

RANK = int(os.environ["RANK"])
options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
rpc.init_rpc(
    f"rank-{RANK}", rank=RANK, rpc_backend_options=options, world_size=int(os.environ["WORLD_SIZE"])
)
rpc.shutdown()
