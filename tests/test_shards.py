"""Two processes with a part of the batch each have the gradient of one process with all of it, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from agent_helpers import lm_agent

from textenv.agents import LanguageModelPolicy
from textenv.agents.losses import Counts, aggregate, clipped_policy_loss

WORKER = """
import json, os, sys
import torch
import torch.distributed as dist
from textenv.agents import LanguageModelPolicy
from textenv.agents.losses import Counts, aggregate, clipped_policy_loss

folder, rank, rows = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
batch = torch.load(f"{folder}/batch.pt", weights_only=True)
policy = LanguageModelPolicy.from_pretrained(f"{folder}/model", lora_rank=4)
mine = {name: tensor[rows] for name, tensor in batch.items()}
counts = torch.tensor(Counts.of(mine["response_mask"]))
dist.all_reduce(counts)  # the denominators are those of both
if rows:
    width = mine["response_mask"].shape[1]
    logprobs = policy.evaluate(mine["input_ids"], mine["attention_mask"], width).logprobs
    losses = clipped_policy_loss(logprobs, mine["logprobs"], mine["advantages"], mine["response_mask"])
    aggregate(losses, mine["response_mask"], sys.argv[4], Counts(*counts.tolist())).backward()
gradients = {}
for name, parameter in policy.named_parameters():
    if parameter.requires_grad:
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradients[name])  # on every rank, whatever it holds
if rank == 0:
    torch.save(gradients, f"{folder}/gradients.pt")
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # at a normal exit gloo's threads may end after what they use
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "shards, mode",
    [
        (([0, 1, 2, 3], [4, 5, 6, 7]), "token-mean"),
        (([0, 1, 2, 3, 4, 5, 6], [7]), "seq-mean-token-mean"),
        ((list(range(8)), []), "token-mean"),
    ],
    ids=["halves", "unequal", "one is empty"],
)
def test_two_processes_have_the_gradient_of_one(tiny_model, tmp_path, shards, mode):
    rollout = lm_agent(tiny_model).rollout()
    names = ("input_ids", "attention_mask", "response_mask", "logprobs", "advantages")
    torch.save({name: getattr(rollout, name)[:8].clone() for name in names}, tmp_path / "batch.pt")
    os.symlink(tiny_model, tmp_path / "model")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), str(rank), json.dumps(rows), mode],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank, rows in enumerate(shards)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    both = torch.load(tmp_path / "gradients.pt", weights_only=True)
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    batch = rollout.rows(torch.arange(8))
    logprobs = policy.evaluate(batch.input_ids, batch.attention_mask, batch.response_tokens).logprobs
    losses = clipped_policy_loss(logprobs, batch.logprobs, batch.advantages, batch.response_mask)
    aggregate(losses, batch.response_mask, mode, Counts.of(batch.response_mask)).backward()
    whole = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert len(set(batch.response_mask.sum(-1).tolist())) > 2
    assert max(gradient.abs().max() for gradient in whole.values()) > 1e-4
    for name, gradient in whole.items():
        torch.testing.assert_close(both[name], gradient, atol=1e-6, rtol=1e-4)
