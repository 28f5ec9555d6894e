"""New weights for vLLM servers straight from GPU to GPUs, with vLLM's own transfer over NCCL.

Written after vLLM 0.32's trainer-side interface. Not tested yet: it needs two GPUs, one for the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from textenv.agents.rollouts.vllm_scope import undisturbed
from textenv.agents.rollouts.vllm_server_http import Server
from textenv.agents.rollouts.vllm_server_weights import everywhere
from textenv.agents.rollouts.vllm_weights import engine_weights


class NCCLTransfer:
    """Sends weights from the trainer's GPU to the servers' GPUs with vLLM's trainer-side transfer engine.

    The servers must have been started with ``--weight-transfer-config '{"backend": "nccl"}'`` on other cards than the
    trainer's: NCCL joins different cards only.

    Args:
        policy: a `LanguageModelPolicy` on a GPU.
        servers: all of them.
    """

    def __init__(self, policy: Any, servers: Sequence[Server]) -> None:
        self.client = Fleet(servers)
        with undisturbed(cpu=False):
            from vllm.distributed.weight_transfer import nccl_engine
            from vllm.utils.network_utils import get_ip, get_open_port

            self.source = _source(policy)
            where = nccl_engine.NCCLTrainerInitInfo(
                rank=0, master_address=get_ip(), master_port=get_open_port(), world_size=1 + sum(self.client.sizes)
            )
            joined = nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init
            self.engine = joined(where, client=self.client, source=self.source)

    def send(self, policy: Any, servers: Sequence[Server]) -> None:  # noqa: ARG002 - those it was made with
        """Give the policy's weights to all servers; see `FolderTransfer.send`."""
        self.source.policy = policy
        with undisturbed(cpu=False):
            self.engine.send_weights()

    def close(self) -> None:
        """Leave the NCCL group on both sides."""
        self.engine.shutdown()
        self.client.shutdown_weight_transfer_engine()


class Fleet:
    """All servers as the one that vLLM's trainer-side engine talks to (`VLLMWeightSyncClient`). Nothing is sent twice:
    the other side of each call is an NCCL operation.
    """  # noqa: D205

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers
        found = everywhere(servers, lambda server: server.get("/get_world_size", "say how many GPUs it has"))
        self.sizes = [answer["world_size"] for answer in found]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the NCCL group, each server with the ranks after those before it."""
        ranks = {id(server): 1 + sum(self.sizes[:place]) for place, server in enumerate(self.servers)}
        self._post("/init_weight_transfer_engine", lambda s: {"init_info": init_info | {"rank_offset": ranks[id(s)]}})

    def start_weight_update(self) -> None:
        """Make ready for new weights."""
        self._post("/start_weight_update", lambda _: None)

    def update_weights(self, update_info: Any) -> None:
        """Receive them: the trainer broadcasts meanwhile."""
        self._post("/update_weights", lambda _: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Use them."""
        self._post("/finish_weight_update", lambda _: {"weight_version": weight_version})

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave the NCCL group."""
        self._post("/shutdown_weight_transfer_engine", lambda _: None)

    def _post(self, path: str, body: Callable[[Server], Any]) -> None:
        everywhere(self.servers, lambda server: server.post(path, body(server), "take over new weights", attempts=1))


def _source(policy: Any) -> Any:
    """The policy's merged weights as vLLM's `WeightSource`."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class MergedWeights(WeightSource):
        def __init__(self) -> None:
            self.policy = policy

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return engine_weights(self.policy)

    return MergedWeights()
