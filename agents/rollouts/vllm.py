"""`VLLMEngine`: real vLLM in the process that trains, on a GPU or a CPU. Token ids in, token ids out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from textenv.agents.rollouts.base import check_temperature
from textenv.agents.rollouts.sync_proof import PROVEN_SYNCS, Probe, SyncProof
from textenv.agents.rollouts.vllm_loading import EngineOptions, load_vllm, repack_tied_heads, unload_vllm
from textenv.agents.rollouts.vllm_requests import check_prompts, repeated, request_seeds, sampling_parameters
from textenv.agents.rollouts.vllm_sampling import install_streams
from textenv.agents.rollouts.vllm_scope import undisturbed
from textenv.agents.rollouts.vllm_weights import engine_vocab_size, engine_weights
from textenv.agents.types import Generation, Sampling
from textenv.lm.weights import Fingerprint

if TYPE_CHECKING:
    from textenv.agents.language_model import LanguageModelPolicy

_live: weakref.ref[VLLMEngine] | None = None
"""vLLM keeps part of its state in globals, so that a process can hold one engine at a time."""


class VLLMEngine:
    """Writes with vLLM, and takes the policy's weights over in memory: `sync` writes no file and starts no process.

    Sampling, log-probabilities and the ids that can be drawn are the policy's: nothing comes from a model folder's
    generation_config, and rows of the embeddings without a token do not exist in the engine. Rows are seeded one by
    one, so that equal seeds and prompts give equal responses; on CPUs those that `HFEngine` writes, but for rounding.
    Samples of one prompt share its whole cache blocks (32 tokens on CPUs). The process around it stays as it was, see
    `vllm_scope`.

    Args:
        policy: a `LanguageModelPolicy` of an architecture that vLLM knows.
        dtype: of the engine's arithmetic and weights, ``"float32"`` or ``"bfloat16"``; None: the policy's.
        max_model_len: tokens of prompt and response together; None: the model's context, or what the cache can hold of
            it.
        max_rows: responses that are decoded together.
        kv_cache_gib: memory for keys and values, on CPUs.
        gpu_memory_utilization: share of the card that vLLM may fill, on GPUs; the trainer needs the rest.
        enforce_eager: no CUDA graphs and no compilation, on GPUs: slower, and quicker to load. CPUs always run eagerly.
        sleep: on GPUs, move weights to the host's memory and drop the cache while the trainer works; they come back at
            the next `sync` or `generate`. Nothing happens on CPUs.
        proven_syncs: so many syncs are checked, see `sync_proof`; the first belongs to loading.

    Raises:
        ImportError: vLLM is not installed.
        TypeError: not a language-model policy.
        ValueError: bad limits, or a model that vLLM cannot run here.
        RuntimeError: another engine is alive in this process.
        SyncError: the policy's weights did not arrive.
    """

    def __init__(
        self,
        policy: LanguageModelPolicy,
        *,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_rows: int = 256,
        kv_cache_gib: float = 1.0,
        gpu_memory_utilization: float = 0.35,
        enforce_eager: bool = False,
        sleep: bool = True,
        proven_syncs: int = PROVEN_SYNCS,
    ) -> None:
        global _live
        self.llm: Any = None
        _check_policy(policy)
        options = EngineOptions(
            dtype=dtype or policy.lm.dtype,
            max_model_len=max_model_len,
            max_rows=max_rows,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            sleep=sleep,
        )
        _check_alone()
        self._cpu = policy.lm.device.type == "cpu"
        self._sleeps, self._asleep = sleep and not self._cpu, False
        self._synced: Fingerprint | None = None
        self.policy, self.vocab_size = policy, engine_vocab_size(policy)
        with self._undisturbed():
            self.llm = load_vllm(policy, options)
            self._streams = install_streams(self.llm) if self._cpu else None
        _live = weakref.ref(self)
        self._unload = weakref.finalize(self, unload_vllm, self.llm, self._cpu)
        self.context: int = self.llm.model_config.max_model_len
        probe = Probe.of(self.vocab_size, self.context)
        self.proof = SyncProof(probe, self._ask, dtype=options.dtype, name="VLLMEngine", syncs=proven_syncs)
        try:
            self.sync(policy)
        except BaseException:
            self.close()
            raise

    def _undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed(cpu=self._cpu)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """See `Engine.generate`. `Generation.logprobs` is None at temperature 0, where nothing was drawn.

        Raises:
            ValueError: another temperature than the policy's, a constraint that vLLM cannot follow, or a prompt that
                is empty, has unknown ids or does not fit the context with its response.
        """
        self._check_open()
        check_temperature(self.policy, sampling)
        parameters = sampling_parameters(sampling)
        check_prompts(prompts, sampling.max_tokens, self.context, self.vocab_size, sampling.samples_per_prompt)
        seeds = request_seeds(sampling, len(prompts))
        outputs = self._run(repeated(prompts, sampling), [{**parameters, "seed": seed} for seed in seeds])
        responses = [np.array(output.token_ids, dtype=np.int64) for output in outputs]
        if sampling.temperature == 0:
            return Generation(responses)
        logprobs = [np.array(output.logprobs.logprobs, dtype=np.float32) for output in outputs]
        return Generation(responses, logprobs=logprobs)

    def sync(self, policy: LanguageModelPolicy) -> None:
        """Take over the policy's weights, adapters merged; nothing is copied where they have not changed since.

        Raises:
            ValueError: a policy of another architecture.
            SyncError: trainer and engine disagree afterwards; only the first syncs are checked.
        """
        self._check_open()
        if policy is not self.policy:
            self._check_same_model(policy)
        elif self._synced is not None and not self._synced.changed():
            return
        self.policy, self._synced = policy, None
        fingerprint = Fingerprint(policy.lm.model)
        self.proof.around(policy, lambda: self._load(policy))
        self._synced = fingerprint

    def close(self) -> None:
        """Free what vLLM holds; the engine cannot be used after it. An engine that is forgotten closes itself."""
        global _live
        if self.llm is not None:
            self.llm = _live = None
            self._unload()

    def _load(self, policy: LanguageModelPolicy) -> None:
        with self._undisturbed():
            self._wake()
            weights = {"weights_iterator": engine_weights(policy), "is_checkpoint_format": True}
            self.llm.collective_rpc("reload_weights", kwargs=weights)
            if self._cpu:
                self.llm.apply_model(repack_tied_heads)
            self.llm.reset_prefix_cache()  # vLLM keeps keys and values of the old weights otherwise

    def _ask(self, probe: Probe) -> NDArray[np.float64]:
        """The probe's log-probabilities (N, K), on the road that generation takes."""
        sampling = Sampling(max_tokens=1, stop_ids=(), temperature=self.policy.temperature)
        asked = {"logprobs": len(probe.tokens), "logprob_token_ids": list(probe.tokens), "seed": 0}
        parameters = sampling_parameters(sampling) | asked
        outputs = self._run([list(prefix) for prefix in probe.prefixes], [parameters] * len(probe.prefixes))
        places = [dict(zip(output.logprobs.token_ids, output.logprobs.logprobs, strict=True)) for output in outputs]
        return np.array([[place[token] for token in probe.tokens] for place in places])

    def _run(self, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> list[Any]:
        """Completions, one per prompt, in order."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        plain: dict[str, Any] = {
            "detokenize": False,
            "flat_logprobs": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        with self._undisturbed():
            self._wake()
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            asked = [SamplingParams(**given, **plain, skip_clone=True) for given in parameters]
            if self._streams is not None:
                self._streams.clear()
            outputs = self.llm.generate(requests, asked, use_tqdm=False)
            if self._sleeps:
                self.llm.sleep(level=1)
                self._asleep = True
        return [output.outputs[0] for output in outputs]

    def _wake(self) -> None:
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False

    def _check_open(self) -> None:
        if self.llm is None:
            raise RuntimeError("The engine should be open, but `close` was called. Make another VLLMEngine.")

    def _check_same_model(self, policy: Any) -> None:
        _check_policy(policy)
        shapes = [
            {name: tuple(tensor.shape) for name, tensor in engine_weights(each)} for each in (self.policy, policy)
        ]
        if shapes[0] != shapes[1]:
            differing = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[0][0]
            raise ValueError(
                "`sync` should be given a policy of the architecture that the engine was made for, got one whose "
                f"weights differ, {differing!r} the first. Close the engine and make another one for it."
            )


def _check_policy(policy: Any) -> None:
    if not hasattr(policy, "lm"):
        raise TypeError(
            f"vLLM runs language models: `policy` should be a LanguageModelPolicy, got {type(policy).__name__}. Other "
            "policies write with their own engine: engine=None."
        )


def _check_alone() -> None:
    if _live is not None and _live() is not None:
        gc.collect()  # one that was forgotten, in a cycle of references
    if _live is not None and _live() is not None:
        raise RuntimeError(
            "A process can hold one VLLMEngine at a time, and another one is open: vLLM keeps part of its state in "
            "globals. Call its close() first, or use VLLMServerEngine."
        )
