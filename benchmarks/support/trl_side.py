"""TRL's PPO on the work, timed from outside. Runs in TRL's own environment: torch, transformers, trl, no textenv.

Phases end where TRL calls `batch_generation`, then `masked_whiten` (the last thing before its epochs), then
`on_step_end`.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from support.process import run

PAD = "<|endoftext|>"
"""TRL takes masks from ids: its padding must be another id than the end-of-sequence token, which SmolLM2's is not."""


class Clock(TrainerCallback):
    """Seconds of each iteration by phase."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self.logs: list[dict[str, float]] = []
        self._last = 0.0
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """The phase that began at the last mark ends here."""
        now = time.perf_counter()
        self._phases[phase], self._last = now - self._last, now

    def marking(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with a mark at its end."""

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.mark(phase)
            return result

        return marked

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last = time.perf_counter()

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        self.logs.append(dict(logs or {}))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.mark("update")
        self.iterations.append(self._phases)
        self._phases = {}


def config(job: dict[str, Any], folder: str) -> PPOConfig:
    """Every setting that decides how much is computed; nothing is written, no samples are generated."""
    return PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=job["batch_size"],
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=job["batch_size"],
        num_ppo_epochs=job["epochs"],
        num_mini_batches=job["num_minibatches"],
        total_episodes=job["batch_size"] * (1 + job["iterations"]),
        response_length=job["response_tokens"],
        stop_token=None,
        temperature=1.0,
        kl_coef=job["kl_coef"],
        learning_rate=1e-6,
        # On by default, but this trainer of TRL 1.12 acts on neither: its Accelerator is not told of bf16, and its
        # training loop does not turn checkpointing on. Off says what happens.
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        num_sample_generations=0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job["seed"],
    )


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each iteration after the first, by phase."""
    torch.set_num_threads(job["threads"])
    if job["variant"] == "medium":
        torch.set_float32_matmul_precision("medium")
    dtype = torch.bfloat16 if job["variant"] == "bf16" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left", pad_token=PAD)
    policy, reference = (AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype) for _ in range(2))
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(job["classifier"], num_labels=1, dtype=dtype)
        for _ in range(2)
    )
    clock = Clock()
    ppo_trainer.batch_generation = clock.marking("generate", ppo_trainer.batch_generation)
    ppo_trainer.masked_whiten = clock.marking("forward", ppo_trainer.masked_whiten)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            args=config(job, folder),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=value,
            train_dataset=Dataset.from_dict({"input_ids": job["prompts"]}),
            callbacks=[clock],
        )
        trainer.train()
    return {
        "iterations": clock.iterations[1:],
        "tokens": job["batch_size"] * job["response_tokens"],
        "kl": [log["objective/kl"] for log in clock.logs if "objective/kl" in log],
        "score": [log["objective/scores"] for log in clock.logs if "objective/scores" in log],
    }


if __name__ == "__main__":
    run(main)
