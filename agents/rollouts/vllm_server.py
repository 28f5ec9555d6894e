"""`VLLMServerEngine`: writes through one or several vLLM servers, which get the policy's weights before each batch."""

from __future__ import annotations

import heapq
import os
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from textenv.agents.rollouts.base import check_temperature
from textenv.agents.rollouts.sync_proof import PROVEN_SYNCS, Probe, SyncProof, trainer_logprobs
from textenv.agents.rollouts.vllm_requests import check_prompts, repeated, request_seeds, sampling_parameters
from textenv.agents.rollouts.vllm_server_checks import check_policy, check_urls, context_of, open_server
from textenv.agents.rollouts.vllm_server_http import GENERATE, Server, ServerError
from textenv.agents.rollouts.vllm_server_nccl import NCCLTransfer
from textenv.agents.rollouts.vllm_server_weights import FolderTransfer, everywhere
from textenv.agents.rollouts.vllm_weights import engine_vocab_size
from textenv.agents.types import Generation, Sampling
from textenv.lm.weights import Fingerprint

if TYPE_CHECKING:
    from textenv.agents.language_model import LanguageModelPolicy


class VLLMServerEngine:
    """Writes with vLLM servers on this machine or others, all with the policy's weights.

    Rows are spread over the servers by their prompts' lengths, those of one prompt on one server, which computes whole
    cache blocks of it once. Which server writes a row does not show: seeds belong to rows. Start servers with `serve`,
    or with `server_command` on a folder from `write_server_folder`.

    Weights travel before any server writes again: between GPUs through vLLM's weight transfer where the policy is on a
    GPU and the servers were started with ``--weight-transfer-config '{"backend": "nccl"}'``; else through a checkpoint
    folder in shared memory, removed once read. Each transfer gets a version, which every response must carry: a server
    that was restarted, or fed by another run, is an error and not off-policy data.

    Args:
        policy: a `LanguageModelPolicy`.
        urls: of the servers, such as ``["http://127.0.0.1:8000"]``.
        weights_folder: where checkpoint folders are made; None: shared memory. Servers on other machines or in
            containers need a folder that they see under the same path.
        timeout: seconds for an answer, the slowest response or new weights included.
        proven_syncs: so many syncs are checked on every server, see `sync_proof`.

    Raises:
        ImportError: the HTTP client is not installed.
        TypeError: not a language-model policy.
        ValueError: no URL, or one twice.
        ServerError: a server that does not answer, or was not started as this engine needs it.
    """

    def __init__(
        self,
        policy: LanguageModelPolicy,
        urls: str | Sequence[str],
        *,
        weights_folder: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        proven_syncs: int = PROVEN_SYNCS,
    ) -> None:
        check_policy(policy)
        urls = check_urls(urls)
        self.policy, self.vocab_size = policy, engine_vocab_size(policy)
        self._synced: Fingerprint | None = None
        self._version = ""
        self.servers = [Server(url, timeout) for url in urls]
        try:
            settings = everywhere(self.servers, lambda server: open_server(server, policy))
            self.context = context_of(policy, settings)
            self.transfer: FolderTransfer | NCCLTransfer
            if policy.lm.device.type == "cuda" and all(found.nccl for found in settings):
                self.transfer = NCCLTransfer(policy, self.servers)
            else:
                method = "reload_tied_weights" if any(found.cpu for found in settings) else "reload_weights"
                self.transfer = FolderTransfer(policy.lm.dtype, weights_folder, method)
        except BaseException:
            self._disconnect()
            raise
        self._rows_at_once = {server.url: found.rows for server, found in zip(self.servers, settings, strict=True)}
        self._probe = Probe.of(self.vocab_size, self.context)
        self.proofs = {url: self._proof(url, proven_syncs) for url in self._rows_at_once}

    def _proof(self, url: str, syncs: int) -> SyncProof:
        [server] = [server for server in self.servers if server.url == url]
        dtype = self.policy.lm.dtype
        name = f"VLLMServerEngine at {url}"
        return SyncProof(self._probe, lambda _: self._ask(server), dtype=dtype, name=name, syncs=syncs)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """See `Engine.generate`. `Generation.logprobs` is None at temperature 0, where nothing was drawn.

        Raises:
            ValueError: another temperature than the policy's, a constraint that vLLM cannot follow, or a prompt that
                is empty, has unknown ids or does not fit the context with its response.
            ServerError: a server is gone, or has other weights than those of the last `sync`.
            RuntimeError: `sync` was never called.
        """
        check_temperature(self.policy, sampling)
        parameters = sampling_parameters(sampling)
        check_prompts(prompts, sampling.max_tokens, self.context, self.vocab_size)
        if not self._version:
            raise RuntimeError(
                "`sync` should come before `generate`: the servers do not have the policy's weights yet."
            )
        parameters["detokenize"] = False
        rows = [
            {"token_ids": prompt, "sampling_params": parameters | {"seed": seed}}
            for prompt, seed in zip(repeated(prompts, sampling), request_seeds(sampling, len(prompts)), strict=True)
        ]
        places = spread([len(prompt) + sampling.max_tokens for prompt in prompts], len(self.servers))
        places = [place for place in places for _ in range(sampling.samples_per_prompt)]
        choices = self._run(rows, places)
        responses = [np.array(choice["token_ids"], dtype=np.int64) for choice in choices]
        if sampling.temperature == 0:
            return Generation(responses)
        contents = [choice["logprobs"]["content"] for choice in choices]
        logprobs = [np.array([token["logprob"] for token in content], dtype=np.float32) for content in contents]
        return Generation(responses, logprobs=logprobs)

    def _run(self, rows: list[dict[str, Any]], places: list[int]) -> list[dict[str, Any]]:
        """The choice that answers each row, asked of the server at its place; the first failure ends the call."""
        pools = [ThreadPoolExecutor(max_workers=self._rows_at_once[server.url]) for server in self.servers]
        try:
            futures: list[Future[dict[str, Any]]] = [
                pools[place].submit(self._write, self.servers[place], row)
                for row, place in zip(rows, places, strict=True)
            ]
            return [future.result() for future in futures]
        finally:
            for pool in pools:  # nothing is left running unless a row failed; those requests end with their timeouts
                pool.shutdown(wait=False, cancel_futures=True)

    def _write(self, server: Server, row: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = server.post(GENERATE, row, "write a response")["choices"][0]
        versions = {span["version"] for span in choice["weight_versions"]}
        if versions != {self._version}:
            self._synced = None  # the next sync sends them again
            raise ServerError(
                f"The vLLM server at {server.url} should write with the weights of the last sync, version "
                f"{self._version}, but wrote with {', '.join(sorted(versions))}. It was restarted, or another run "
                "sends weights to it too: give each run servers of its own. Call learn() again to send them anew."
            )
        if choice["finish_reason"] not in ("stop", "length"):
            raise ServerError(
                f"The vLLM server at {server.url} should end a response with a stop id or the budget, but ended it "
                f"with {choice['finish_reason']!r}. Its log says why; call learn() again."
            )
        return choice

    def sync(self, policy: LanguageModelPolicy) -> None:
        """Take over the policy's weights, adapters merged; nothing is sent where they have not changed since.

        Raises:
            ServerError: a server is gone or refused them. The next call sends them to all again.
            SyncError: trainer and a server disagree afterwards; only the first syncs are checked.
        """
        if policy is self.policy and self._synced is not None and not self._synced.changed():
            return
        check_policy(policy)
        self.policy, self._synced = policy, None
        fingerprint = Fingerprint(policy.lm.model)
        unproven = [server for server in self.servers if self._unproven(server)]
        before = everywhere(unproven, self._ask)
        self._send(policy)
        after = everywhere(unproven, self._ask)
        trainer = trainer_logprobs(policy, self._probe) if unproven else None
        for server, old, new in zip(unproven, before, after, strict=True):
            assert trainer is not None
            self.proofs[server.url].check(trainer, old, new)
        self._synced = fingerprint

    def _unproven(self, server: Server) -> bool:
        proof = self.proofs[server.url]
        return proof.proven < proof.syncs

    def _send(self, policy: LanguageModelPolicy) -> None:
        self.transfer.send(policy, self.servers)
        version = uuid.uuid4().hex

        def settle(server: Server) -> None:
            answer = server.post("/reset_prefix_cache", None, "forget what it computed with the old weights")
            if not answer["success"]:
                raise ServerError(
                    f"The vLLM server at {server.url} should empty its prefix cache, but requests are running on it: "
                    "responses would mix old and new weights. Give each run servers of its own, then learn() again."
                )
            server.post("/update_weight_version", {"new_version": version}, "name its weights")

        everywhere(self.servers, settle)
        self._version = version

    def _ask(self, server: Server) -> NDArray[np.float64]:
        """The probe's log-probabilities (N, K) under one server, on the road that generation takes."""
        sampling = Sampling(max_tokens=1, stop_ids=(), temperature=self.policy.temperature)
        tokens = list(self._probe.tokens)
        listed = [*tokens, tokens[0]]  # one entry goes to the drawn token, and the last of the list is left out for it
        asked = {"logprobs": len(listed), "logprob_token_ids": listed, "seed": 0, "detokenize": False}
        rows = []
        for prefix in self._probe.prefixes:
            body = {"token_ids": list(prefix), "sampling_params": sampling_parameters(sampling) | asked}
            [content] = server.post(GENERATE, body, "answer the probe")["choices"][0]["logprobs"]["content"]
            found = {token["token_id"]: token["logprob"] for token in content["top_logprobs"]}
            rows.append([found[token] for token in tokens])
        return np.array(rows)

    def close(self) -> None:
        """Disconnect. The servers run on."""
        self.transfer.close()
        self._disconnect()

    def _disconnect(self) -> None:
        for server in self.servers:
            server.close()


def spread(costs: Sequence[int], servers: int) -> list[int]:
    """The server of each prompt: from the most expensive to the cheapest, always the one with the least to do.

    Args:
        costs: of each prompt, not negative.
        servers: how many.

    Returns:
        One index below `servers` per prompt; the same for equal arguments.
    """
    loads = [(0, server) for server in range(servers)]
    places = [0] * len(costs)
    for prompt in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, server = heapq.heappop(loads)
        places[prompt] = server
        heapq.heappush(loads, (load + costs[prompt], server))
    return places
