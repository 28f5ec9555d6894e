"""The whole road on film reviews: imitate, learn a reward from comparisons, optimise it on a leash, ask the judge.

    1-sft      SmolLM2-135M imitates reviews that people rated highly
    2-reward   a reward model learns from comparisons of single raters
    3-ppo      PPO raises its score; policy and reference both start from what stage 1 left
    report     the policies of stages 1 and 3 on held-out openings, judged by a gold scorer that learned from far more
               comparisons than stage 2 and that nothing was trained against

    python examples/full_pipeline.py                  # ten minutes on two cores
    python examples/full_pipeline.py --name first     # again after an interruption: every stage goes on where it was
    python examples/full_pipeline.py --help

Writes runs/<name>/ with a folder for each stage, and report.json.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console

import textenv  # noqa: F401 - registers RLHF-v0
from textenv import DemonstrationSet
from textenv.agents import PPO, SFT, LanguageModelPolicy, PPOConfig, SFTConfig, attach
from textenv.agents.rollouts.collect import collect
from textenv.estimates import mean_estimate
from textenv.lm.precision import fast_dtype
from textenv.rewards import (
    PreferenceData,
    RewardNetwork,
    RewardTrainer,
    RewardTrainingConfig,
    SequenceClassificationReward,
    film_review_network,
    load_openings,
    load_ratings,
    load_review_demonstrations,
    preferences_from_ratings,
    save_classifier,
    split_ratings,
)
from textenv.rlhf import SENTENCE_ENDS


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the run. A run that goes on needs the same ones."""

    name: str = "full-pipeline"
    """Files go to runs/<name>/; a run that is there already goes on."""
    seed: int = 0
    """Of every stage."""
    demonstrations: int = 1000
    """Reviews to imitate."""
    comparisons: int = 1500
    """Comparisons of single raters to learn the reward from."""
    episodes: int = 960
    """Responses of PPO."""
    num_envs: int = 48
    """Responses per iteration of PPO."""
    kl_coef: float = 0.1
    """Price of a nat."""
    learning_rate: float = 6e-4
    """Of AdamW in PPO."""
    max_response_tokens: int = 24
    """Budget of a response in stages 1 and 3."""
    lora_rank: int = 16
    """Of the policy's adapters."""
    held_out: int = 144
    """Openings on which the policies are compared; no stage sees them."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic; auto: bfloat16 where the processor multiplies it natively."""

    @property
    def arithmetic(self) -> str:
        return fast_dtype() if self.dtype == "auto" else self.dtype


def make_envs(arguments: Arguments, num_envs: int, prompts: list[str], **options: Any) -> Any:
    """Environments that continue openings of film reviews to the end of a sentence."""
    return gym.make_vec(
        "RLHF-v0",
        num_envs=num_envs,
        prompts=prompts,
        stop=SENTENCE_ENDS,
        max_prompt_tokens=16,
        max_response_tokens=arguments.max_response_tokens,
        dtype=arguments.arithmetic,
        **options,
    )


def clone(arguments: Arguments, folder: Path, prompts: list[str]) -> Path:
    """Stage 1: SFT. Returns the folder of the whole model that is policy and reference of stage 3."""
    merged = folder / "merged"
    if merged.exists():
        return merged
    envs = make_envs(arguments, 16, prompts)
    train, held_out = (
        DemonstrationSet.encode(side[:count], envs, unfit="drop")
        for side, count in zip(load_review_demonstrations(), (arguments.demonstrations, 256), strict=True)
    )
    if (folder / "checkpoint").exists():
        agent = SFT.load(folder, train, held_out=held_out)
    else:
        options: dict[str, Any] = {"lora_rank": arguments.lora_rank, "dtype": arguments.arithmetic}
        policy = LanguageModelPolicy.from_pretrained("smollm2-135m", seed=arguments.seed, **options)
        config = SFTConfig(learning_rate=4e-4, batch_size=32, epochs=1)
        agent = SFT(policy, train, config, held_out=held_out, seed=arguments.seed)
    agent.learn(folder, save_every=10)
    agent.policy.save_merged(merged)
    return merged


def learn_reward(arguments: Arguments, folder: Path) -> SequenceClassificationReward:
    """Stage 2: adapters and a head, from comparisons. Returns the proxy that PPO raises."""
    classifier = folder / "classifier"
    if not classifier.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sentences, _ = split_ratings(load_ratings())
        drawn = preferences_from_ratings(sentences, arguments.comparisons, np.random.default_rng(arguments.seed))
        network = RewardNetwork.from_pretrained(lora_rank=8, dtype=arguments.arithmetic, seed=arguments.seed)
        data = PreferenceData(drawn, network.encode, seed=arguments.seed)
        config = RewardTrainingConfig(learning_rate=5e-4, save_every=10)
        RewardTrainer(network, data, config, folder / "checkpoint.safetensors").train()
        texts = [s.text for s in sentences[:: max(1, len(sentences) // 300)]]  # of all kinds: the file is sorted
        network.centre([""] * len(texts), texts)
        save_classifier(network, classifier)
    return SequenceClassificationReward(classifier, dtype=arguments.arithmetic)


def optimise(arguments: Arguments, folder: Path, model: Path, scorer: Any, prompts: list[str]) -> LanguageModelPolicy:
    """Stage 3: PPO on the leash of the cloned model. Returns the aligned policy."""
    shaping = {"kl_coef": arguments.kl_coef, "missing_eos_penalty": 1.0}
    envs = make_envs(arguments, arguments.num_envs, prompts, model=str(model), scorer=scorer, **shaping)
    if (folder / "checkpoint").exists():
        agent = PPO.load(folder, envs)
    else:
        options: dict[str, Any] = {"lora_rank": arguments.lora_rank, "dtype": arguments.arithmetic}
        policy = LanguageModelPolicy.from_pretrained(model, seed=arguments.seed, **options)
        config = PPOConfig(
            learning_rate=arguments.learning_rate, lr_schedule="linear", epochs=2, num_minibatches=3, gamma=1.0
        )
        agent = PPO(policy, envs, config, seed=arguments.seed)
    if agent.episodes < arguments.episodes:
        agent.learn(arguments.episodes, run_dir=folder)
    policy: LanguageModelPolicy = agent.policy  # type: ignore[no-redef]
    return policy


def judge(policy: LanguageModelPolicy, envs: Any, gold: RewardNetwork) -> dict[str, Any]:
    """What a policy writes to the held-out openings, in their order: gold and proxy scores, KL to the cloned model."""
    attach(policy, envs)
    engine = policy.engine()
    episodes = collect(policy, envs, engine, episodes=envs.num_envs, seed=12345, env_seed=0)
    engine.close()
    return {
        "gold": gold.score(list(episodes.prompts), list(episodes.responses)),
        "proxy": episodes.replayed.scores,
        "kl": float(episodes.replayed.infos["kl"].mean()),
        "samples": [f"{p} |{r}" for p, r in zip(episodes.prompts, episodes.responses, strict=True)][:4],
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Means of both policies, and the mean difference on the same openings with its 95% interval."""

    def mean(scores: NDArray[np.float64]) -> float:
        return float(np.mean(scores))

    report: dict[str, Any] = {
        name: {"gold": mean(side["gold"]), "proxy": mean(side["proxy"]), "kl": side["kl"], "samples": side["samples"]}
        for name, side in (("sft", before), ("ppo", after))
    }
    for score in ("gold", "proxy"):
        report[f"{score}_gain"] = mean_estimate(after[score] - before[score])._asdict()
    report["gold_wins"] = mean((np.sign(after["gold"] - before["gold"]) + 1) / 2)
    return report


def main(arguments: Arguments) -> dict[str, Any]:
    console, folder = Console(), Path("runs") / arguments.name
    openings = load_openings()
    held_out, prompts = openings[: arguments.held_out], openings[arguments.held_out :]
    console.rule("1. Imitate")
    model = clone(arguments, folder / "1-sft", prompts)
    console.rule("2. Learn a reward from comparisons")
    proxy = learn_reward(arguments, folder / "2-reward")
    console.rule("3. Optimise it on a leash")
    aligned = optimise(arguments, folder / "3-ppo", model, proxy, prompts)
    console.rule("Judged by the gold scorer")
    gold = film_review_network(dtype=arguments.arithmetic)
    cloned = LanguageModelPolicy.from_pretrained(model, lora_rank=1, dtype=arguments.arithmetic, seed=0)
    envs = make_envs(arguments, len(held_out), held_out, model=str(model), scorer=proxy, order="sequential")
    report = compare(judge(cloned, envs, gold), judge(aligned, envs, gold))
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for name in ("sft", "ppo"):
        for sample in report[name]["samples"]:
            console.print(f"{name}: {sample!r}", highlight=False, markup=False)
    gain = report["gold_gain"]
    console.print(
        f"Gold score {report['sft']['gold']:+.2f} after SFT, {report['ppo']['gold']:+.2f} after PPO at "
        f"{report['ppo']['kl']:.1f} nats: {gain['value']:+.2f} [{gain['low']:+.2f}, {gain['high']:+.2f}], better on "
        f"{report['gold_wins']:.0%} of {len(held_out)} openings."
    )
    return report


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
