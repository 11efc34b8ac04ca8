"""Train with FSDP2, save a checkpoint, and resume on any number of ranks; docs/training.md explains the calls.

torchrun --nproc-per-node 2 examples/fsdp2.py out/fsdp2  # on GPUs, or on CPUs
torchrun --nproc-per-node 4 examples/fsdp2.py out/fsdp2  # resumes
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megamoe

checkpoint = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device, (1, ranks), mesh_dim_names=("copies", "experts"))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(128, 8, bias=False)
        self.experts = megamoe.MegaMoE(128, 64, 8, 2, group=mesh["experts"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x.float()).softmax(-1).topk(2)
        return x + self.experts(x, ids, weights)


block = Block().to(device)
fully_shard(block.experts, mesh=mesh["copies"])  # over the ranks that hold the same experts
fully_shard(block)  # everything else, over all ranks
megamoe.average_expert_gradients(block, ranks)
optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
model, moments = get_state_dict(block, optimizer)
state = {"model": model, "optimizer": moments, "step": 0}
if os.path.exists(checkpoint):
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(block, optimizer, model_state_dict=model, optim_state_dict=moments)
x = torch.randn(64, 128, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
for _ in range(10):
    loss = (block(x) - x.roll(1, dims=-1)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model, moments = get_state_dict(block, optimizer)
state |= {"model": model, "optimizer": moments, "step": state["step"] + 10}
dcp.save(state, checkpoint_id=checkpoint)
if rank == 0:
    print(f"{ranks} ranks, step {state['step']}: loss {loss.item():.3f}")
dist.destroy_process_group()
