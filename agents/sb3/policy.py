"""`LanguageModelActorCriticPolicy`: a policy of textenv in the shape that Stable-Baselines3 trains.

Legend: N environments, M states of a minibatch, L columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from textenv.agents.language_model import LanguageModelPolicy
from textenv.agents.rollouts.base import draw_tokens
from textenv.agents.sb3.distribution import TokenDistribution, packed, uniforms
from textenv.agents.sb3.networks import GivenPolicy, build_network
from textenv.agents.sb3.readers import LanguageModelReader, PlainReader
from textenv.agents.training import trained_parameters
from textenv.lm.output_head import forbid
from textenv.packed_masks import PackedMasks

KEYS = ("input_ids", "attention_mask")


class TokenPolicy(BasePolicy):
    """What both policy classes share; see `LanguageModelActorCriticPolicy`."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lr_schedule: Schedule,
        model: Any = "smollm2-135m",
        *,
        response_tokens: int | None = None,
        share_prefixes: bool = True,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        use_sde: bool = False,  # noqa: ARG002 - Stable-Baselines3 says it to every policy; it refuses True itself
        **settings: Any,
    ) -> None:
        if optimizer_kwargs is None:
            # As in Stable-Baselines3's own policies, so that learning rates mean the same.
            optimizer_kwargs = {"eps": 1e-5} if optimizer_class is torch.optim.Adam else {}
        BasePolicy.__init__(
            self,
            observation_space,
            action_space,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            normalize_images=False,
        )
        check_spaces(observation_space, action_space)
        network = build_network(model, settings)
        # Not the module itself, which would be registered here a second time.
        self._model = GivenPolicy(model) if isinstance(model, nn.Module) else model
        self._settings = settings
        self.response_tokens, self.share_prefixes = response_tokens, share_prefixes
        self.reader = make_reader(network, int(action_space.n), response_tokens, share_prefixes)  # type: ignore[attr-defined]
        self.network = network
        self._stepped = 0
        self.optimizer = optimizer_class(trained_parameters(network), lr=lr_schedule(1), **optimizer_kwargs)  # type: ignore[call-arg]

    def forward(self, obs: Any, deterministic: bool = False, action_masks: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Choose a token for each of N rows that grow by tokens; each token is read once, whichever rows reset.

        Nothing carries a gradient: rollouts need none.

        Returns:
            actions (N,), values (N, 1), log-probabilities (N,).
        """
        masks, draws = self._packed(action_masks), uniforms(len(obs[KEYS[0]]), self.device)
        actions, logprobs = [], []
        with torch.no_grad():
            chunks, values = self.reader.step(self._rows(obs))
            for rows, logits in chunks:
                allowed = logits if masks is None else forbid(logits, masks[rows])
                tokens, chosen = draw_tokens(allowed, draws[rows], 0.0 if deterministic else 1.0)
                actions.append(tokens)
                logprobs.append(chosen)
        self._stepped = len(draws)
        return torch.cat(actions), values[:, None], torch.cat(logprobs)

    def evaluate_actions(
        self, obs: Any, actions: Tensor, action_masks: Any = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read M states and the actions taken in them, prefixes of one response in one pass.

        Returns:
            values (M, 1), log-probabilities (M,), entropies (M,), all differentiable.
        """
        reading = self.reader.evaluate(*self._tensors(obs), actions.flatten(), self._packed(action_masks))
        return reading.values[:, None], reading.logprobs, reading.entropies

    def get_distribution(self, obs: Any, action_masks: Any = None) -> Any:
        """The `TokenDistribution` of M states, differentiable: (M, V) numbers."""
        return TokenDistribution(self.reader.logits(*self._tensors(obs)), self._packed(action_masks))

    def predict_values(self, obs: Any) -> Tensor:
        """The values (M, 1); 0 where a response fills its budget: nothing comes after it, so nothing is bootstrapped.

        Right after a rollout's last step, without gradients, the rows cost their newest token.
        """
        ids, mask = self._tensors(obs)
        if not torch.is_grad_enabled() and len(ids) == self._stepped:
            values = self.reader.step_values(self._rows(obs))
        else:
            values = self.reader.values(ids, mask)
        return torch.where(mask[:, -1].bool(), torch.zeros_like(values), values)[:, None]

    def _predict(self, observation: Any, deterministic: bool = False, action_masks: Any = None) -> Tensor:
        return self.forward(observation, deterministic, action_masks)[0]

    def _packed(self, action_masks: Any) -> PackedMasks | None:
        return packed(action_masks, int(self.action_space.n))  # type: ignore[attr-defined]

    def _tensors(self, obs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return obs[KEYS[0]], obs[KEYS[1]]

    def _rows(self, obs: Mapping[str, Tensor]) -> dict[str, Any]:
        return {key: obs[key].cpu().numpy() for key in KEYS}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that train, as `parameters` does: TRPO asks for the gradient of every one it sees."""
        return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if p.requires_grad)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the policy, and the frozen copy that full training has as its reference."""
        super().to(*args, **kwargs)
        reference: Any = getattr(self.network, "reference", None)
        if isinstance(getattr(reference, "model", None), nn.Module):
            reference.model.to(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """What trains, under ``network.``: a saved file has no frozen weights."""
        return {f"network.{name}": tensor for name, tensor in self.network.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over what `state_dict` gave."""
        own = {name.removeprefix("network."): tensor for name, tensor in state_dict.items()}
        return self.network.load_state_dict(own, strict=strict, assign=assign)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,  # for acting alone
            "model": self._model,
            "response_tokens": self.response_tokens,
            "share_prefixes": self.share_prefixes,
            "optimizer_class": self.optimizer_class,
            "optimizer_kwargs": self.optimizer_kwargs,
            **self._settings,
        }


class LanguageModelActorCriticPolicy(TokenPolicy, ActorCriticPolicy):
    """A language model, or any policy of textenv, for PPO, A2C and TRPO.

    The network is the one that our own agents train: trunk, adapters, value head, temperature. In rollouts each token
    is read once. In updates states come in random minibatches; those that are prefixes of another state in the
    minibatch are read off that one's pass, which changes no value or gradient and saves most of the tokens. With
    ``batch_size=n_steps * n_envs`` every response is read once an epoch.

    The optimiser has what trains, and so has a saved file. Arithmetic of the backward pass is the process's: train
    inside ``with textenv.agents.policy.arithmetic(model.policy.network):`` for float32 products as fast as ours.

    Args:
        observation_space: of text environments.
        action_space: `Discrete`, one action per token.
        lr_schedule: the learning rate by remaining progress.
        model: a model's name or folder for `LanguageModelPolicy.from_pretrained`; a function or class that makes a
            policy; or a policy (`policy_kwargs` keeps its weights out of saved files).
        response_tokens: T of the task; policies other than language models need it. `policy_kwargs` fills it in.
        share_prefixes: False reads every state of a minibatch on its own, as policies usually do.
        optimizer_class: of what trains.
        optimizer_kwargs: beside the learning rate; None: eps=1e-5 for Adam, as in Stable-Baselines3.
        use_sde: of Stable-Baselines3, for continuous actions only.
        **settings: further arguments of `from_pretrained`, or of the function.

    Raises:
        TypeError: other spaces than those of text environments; a model or settings that make no policy.
        ValueError: the model has another vocabulary than the environments.
    """


def check_spaces(observation_space: Any, action_space: Any) -> None:
    """Refuse spaces of other environments.

    Raises:
        TypeError: they are not those of text environments.
    """
    keys = sorted(getattr(observation_space, "spaces", {}))
    if keys != sorted(KEYS) or not isinstance(action_space, spaces.Discrete):
        raise TypeError(
            f"Observations should have the keys {sorted(KEYS)} and actions be Discrete, got {observation_space} and "
            f"{action_space}. The policy reads text environments: pass SB3VecEnv(gym.make_vec('RLHF-v0', ...))."
        )


def make_reader(
    network: Any, vocab_size: int, response_tokens: int | None, share_prefixes: bool
) -> LanguageModelReader | PlainReader:
    """What reads states with a policy.

    Raises:
        ValueError: another vocabulary, or no `response_tokens` for a policy that needs it.
    """
    if isinstance(network, LanguageModelPolicy):
        if network.lm.vocab_size != vocab_size:
            raise ValueError(
                f"The model should have one output per action, {vocab_size}, got {network.lm.vocab_size}. Its tokens "
                "would mean something else to the environments. Make both with the same model."
            )
        return LanguageModelReader(network, share_prefixes)
    if response_tokens is None:
        raise ValueError(
            f"`response_tokens` should be the task's budget for a {type(network).__name__}, got None: where prompts "
            "end and responses begin cannot be seen from single states. Use "
            "policy_kwargs=textenv.agents.sb3.policy_kwargs(policy, envs)."
        )
    return PlainReader(network, response_tokens, share_prefixes)
