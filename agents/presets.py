"""The settings of four papers: what their PPO, their environment and their policy were set to, and where that stands.

    preset = Preset("ziegler")
    envs = gym.make_vec("RLHF-v0", num_envs=64, **preset.environment)
    policy = LanguageModelPolicy.from_pretrained("my-sft-model", **preset.policy)
    agent = PPO(policy, envs, preset.config())  # the same as PPOConfig.preset("ziegler")

Each preset has a function of its own (`instructgpt`, `summarize`, `n_plus`, `ziegler`), whose docstring names the
source of each value; "ours" stands where the paper and its code say nothing. Learning rates are those of all weights of
models from 774M parameters on: adapters want some 100 times as much, see `PPOConfig.learning_rate`.

Left out, because `PPO` does not do it: warm-up of the learning rate, averaged weights (EMA), whitened rewards, and a
learning rate of the value function's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textenv.agents.config import PPOConfig

Settings = dict[str, Any]


@dataclass(frozen=True)
class Values:
    """What a preset sets: keyword arguments of three calls."""

    config: Settings
    """Of `PPOConfig`."""
    environment: Settings
    """Of ``gym.make_vec("RLHF-v0", ...)``."""
    policy: Settings
    """Of `LanguageModelPolicy.from_pretrained`."""


SHARED: Settings = {
    "num_minibatches": 1,
    "epochs": 4,
    "lr_schedule": "linear",
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_range_vf": 0.2,
    "vf_coef": 0.1,
}
"""What Ziegler et al. 2019 chose and the two works on TL;DR kept."""


class Preset:
    """A published set-up by name: `config`, `environment` and `policy`.

    Prompts, scorer, model and the number of environments are the user's own. `kl_coef` and `missing_eos_penalty` are in
    units of the score: all four papers shift their reward model's scores to a mean of 0 first, on demonstrations or on
    samples of the reference.

    Args:
        name: ``"instructgpt"``, ``"summarize"``, ``"n_plus"`` or ``"ziegler"``.

    Raises:
        ValueError: there is no preset of that name.
    """

    def __init__(self, name: str) -> None:
        if name not in PRESETS:
            raise ValueError(
                f"`name` should be one of {', '.join(map(repr, PRESETS))}, got {name!r}. Settings of your own go into "
                "PPOConfig(...) and gym.make_vec(...) directly."
            )
        self.name = name
        self._values = PRESETS[name]()

    def __repr__(self) -> str:
        """As it was made."""
        return f"Preset({self.name!r})"

    @property
    def environment(self) -> Settings:
        """Keyword arguments for ``gym.make_vec("RLHF-v0", num_envs=..., **preset.environment)``."""
        return dict(self._values.environment)

    @property
    def policy(self) -> Settings:
        """Keyword arguments for ``LanguageModelPolicy.from_pretrained(model, **preset.policy)``.

        Where `value` is ``"reward"``, give that call the `reward_model` too.
        """
        return dict(self._values.policy)

    @property
    def settings(self) -> Settings:
        """Keyword arguments for `PPOConfig`."""
        return dict(self._values.config)

    @property
    def documentation(self) -> str:
        """The paper, and a table of every value and its source."""
        return PRESETS[self.name].__doc__ or ""

    def config(self, **overrides: Any) -> PPOConfig:
        """The agent's part; see `PPOConfig.preset`."""
        from textenv.agents.config import PPOConfig

        return PPOConfig.preset(self.name, **overrides)


def instructgpt() -> Values:
    """Ouyang et al. 2022, "Training language models to follow instructions with human feedback", arXiv:2203.02155.

    The published model is PPO-ptx: `PPO` needs `pretraining_texts`; `ptx_coef=0.0` gives the paper's "PPO" models. The
    paper also warms the learning rate up over 10 iterations and averages weights (EMA, 0.992), which `PPO` does not.

    | value                         | source                                                                  |
    |-------------------------------|-------------------------------------------------------------------------|
    | episodes_per_iteration = 512  | appendix C.4                                                            |
    | num_minibatches = 8           | appendix C.4: minibatches of 64                                         |
    | epochs = 1                    | appendix C.4: a single inner epoch                                      |
    | learning_rate = 9e-06         | appendix C.4, of the value function; of the policy only a scan (E.9)    |
    | lr_schedule = 'constant'      | appendix C.4                                                            |
    | gamma = 1.0                   | appendix C.4: no discount                                               |
    | gae_lambda = 0.95             | ours: as in Stiennon et al. 2020                                        |
    | clip_range = 0.2              | appendix C.4                                                            |
    | clip_range_vf = None          | ours: not stated                                                        |
    | vf_coef = 0.1                 | ours: not stated, and of no effect on a separate network under Adam     |
    | ptx_coef = 27.8               | appendix C.4, gamma of equation 2                                       |
    | ptx_batch_size = 512          | appendix C.4: 8 times as many pretraining examples as episodes          |
    | kl_coef = 0.02                | appendix C.4, beta of equation 2                                        |
    | max_response_tokens = 1024    | appendix C: at most 1k tokens                                           |
    | temperature = 1.0             | appendix C.4                                                            |
    | value = 'reward'              | appendix C.4: a network of its own, initialised from the reward model   |
    | lora_rank = None              | appendix C: all weights train                                           |
    """
    return Values(
        config={
            "episodes_per_iteration": 512,
            "num_minibatches": 8,
            "epochs": 1,
            "learning_rate": 9e-6,
            "lr_schedule": "constant",
            "gamma": 1.0,
            "gae_lambda": 0.95,
            "clip_range": 0.2,
            "clip_range_vf": None,
            "vf_coef": 0.1,
            "ptx_coef": 27.8,
            "ptx_batch_size": 512,
        },
        environment={"kl_coef": 0.02, "max_response_tokens": 1024, "temperature": 1.0},
        policy={"temperature": 1.0, "value": "reward", "lora_rank": None},
    )


def summarize() -> Values:
    """Stiennon et al. 2020, "Learning to summarize from human feedback", arXiv:2009.01325; the 1.3B model on TL;DR.

    "Code" is openai/summarize-from-feedback, which holds the tasks but no training. The 6.7B model took batches of 256
    and a learning rate of 7e-6.

    | value                         | source                                                                  |
    |-------------------------------|-------------------------------------------------------------------------|
    | episodes_per_iteration = 512  | appendix B.1                                                            |
    | num_minibatches = 1           | ours: not stated; as in the paper's reproduction, Huang et al. 2024     |
    | epochs = 4                    | appendix B.1                                                            |
    | learning_rate = 1.5e-05       | appendix B.1                                                            |
    | lr_schedule = 'linear'        | appendix B.1                                                            |
    | gamma = 1.0                   | appendix B.1                                                            |
    | gae_lambda = 0.95             | appendix B.1                                                            |
    | clip_range = 0.2              | ours: not stated; as in Ziegler et al. 2019                             |
    | clip_range_vf = 0.2           | ours: not stated; as in Ziegler et al. 2019                             |
    | vf_coef = 0.1                 | ours: not stated, and of no effect on a separate network under Adam     |
    | kl_coef = 0.05                | appendix B.1                                                            |
    | max_response_tokens = 48      | section 3.2: summaries below 48 tokens; code, experiment_helpers.py     |
    | temperature = 1.0             | ours: not stated for training                                           |
    | value = 'reward'              | appendix B.1: a network of its own, initialised from the reward model   |
    | lora_rank = None              | appendix B.1: all weights train                                         |
    """
    return Values(
        config={**SHARED, "episodes_per_iteration": 512, "learning_rate": 1.5e-5},
        environment={"kl_coef": 0.05, "max_response_tokens": 48, "temperature": 1.0},
        policy={"temperature": 1.0, "value": "reward", "lora_rank": None},
    )


def n_plus() -> Values:
    """Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO", arXiv:2403.17031; Pythia on TL;DR.

    "Table" is the paper's table of PPO hyperparameters, "code" its repository vwxyzjn/summarize_from_feedback_details.

    | value                         | source                                                                  |
    |-------------------------------|-------------------------------------------------------------------------|
    | episodes_per_iteration = 512  | table                                                                   |
    | num_minibatches = 1           | table                                                                   |
    | epochs = 4                    | table: K                                                                |
    | learning_rate = 3e-06         | table; AdamW, whose epsilon is 1e-5 there and 1e-8 here                 |
    | lr_schedule = 'linear'        | table                                                                   |
    | gamma = 1.0                   | table                                                                   |
    | gae_lambda = 0.95             | table                                                                   |
    | clip_range = 0.2              | table                                                                   |
    | clip_range_vf = 0.2           | table                                                                   |
    | vf_coef = 0.1                 | table                                                                   |
    | whiten_advantages = True      | detail 25; whitening of rewards (detail 24) is optional, off in the code |
    | kl_coef = 0.05                | table                                                                   |
    | missing_eos_penalty = 1.0     | detail 23: a response without EOS scores -1                             |
    | missing_eos_mode = 'replace'  | detail 23                                                               |
    | max_response_tokens = 53      | code: response_length                                                   |
    | temperature = 0.7             | table                                                                   |
    | value = 'reward'              | PPO details: a network of its own, initialised from the reward model    |
    | lora_rank = None              | code: all weights train                                                 |
    """
    return Values(
        config={**SHARED, "episodes_per_iteration": 512, "learning_rate": 3e-6, "whiten_advantages": True},
        environment={
            "kl_coef": 0.05,
            "missing_eos_penalty": 1.0,
            "missing_eos_mode": "replace",
            "max_response_tokens": 53,
            "temperature": 0.7,
        },
        policy={"temperature": 0.7, "value": "reward", "lora_rank": None},
    )


def ziegler() -> Values:
    """Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593; the style tasks.

    "Code" is openai/lm-human-preferences. The summarisation tasks took batches of 512 and a learning rate of 7.07e-6
    (section 2.2), and coefficients of 0.03 (TL;DR) and 0.01 (CNN/DM) without a controller (code, launch.py). The code
    also divides rewards by their standard deviation, which `PPO` does not.

    | value                         | source                                                                  |
    |-------------------------------|-------------------------------------------------------------------------|
    | episodes_per_iteration = 1024 | section 2.2                                                             |
    | num_minibatches = 1           | section 2.2; code, train_policy.py                                      |
    | epochs = 4                    | section 2.2                                                             |
    | learning_rate = 1.41e-05      | section 2.2                                                             |
    | lr_schedule = 'linear'        | code, train_policy.py                                                   |
    | gamma = 1.0                   | section 2.2                                                             |
    | gae_lambda = 0.95             | code, train_policy.py                                                   |
    | clip_range = 0.2              | code, train_policy.py                                                   |
    | clip_range_vf = 0.2           | code, train_policy.py                                                   |
    | vf_coef = 0.1                 | code, train_policy.py                                                   |
    | whiten_advantages = True      | code, train_policy.py                                                   |
    | kl_coef = 0.15                | code, launch.py: where the controller starts                            |
    | target_kl = 6.0               | code, launch.py: nats per response                                      |
    | kl_episodes_per_update = 1024 | section 2.2: K = 0.1 per batch; the same as the code's horizon of 10,000 |
    | missing_eos_penalty = 1.0     | code, lm_tasks.py: a response without the stop token scores -1          |
    | missing_eos_mode = 'replace'  | code, train_policy.py                                                   |
    | normalize_score = True        | section 2.2; there of samples before training, here running             |
    | max_response_tokens = 24      | section 3.1                                                             |
    | temperature = 0.7             | section 3.1                                                             |
    | value = 'trunk'               | code, policy.py: a head on the policy's trunk                           |
    | lora_rank = None              | code: all weights train                                                 |
    """
    return Values(
        config={**SHARED, "episodes_per_iteration": 1024, "learning_rate": 1.41e-5, "whiten_advantages": True},
        environment={
            "kl_coef": 0.15,
            "target_kl": 6.0,
            "kl_episodes_per_update": 1024,
            "missing_eos_penalty": 1.0,
            "missing_eos_mode": "replace",
            "normalize_score": True,
            "max_response_tokens": 24,
            "temperature": 0.7,
        },
        policy={"temperature": 0.7, "value": "trunk", "lora_rank": None},
    )


PRESETS: dict[str, Callable[[], Values]] = {
    "instructgpt": instructgpt,
    "summarize": summarize,
    "n_plus": n_plus,
    "ziegler": ziegler,
}
