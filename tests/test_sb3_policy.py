"""`LanguageModelActorCriticPolicy`: one distribution in rollouts and updates, and prefixes read as seldom as can be."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from agent_helpers import lm_envs
from gymnasium import spaces
from lm_helpers import NAMED, ROWS, GRUPolicy, padded
from sb3_helpers import TOY, Passes, lm_model, moved_policy, toy_model, toy_vec_env
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList
from torch.distributions import Categorical, kl_divergence

from textenv.agents import LanguageModelPolicy, TablePolicy, tiny_transformer
from textenv.agents.sb3 import LanguageModelActorCriticPolicy, SB3VecEnv, policy_kwargs
from textenv.agents.sb3.distribution import TokenDistribution
from textenv.agents.sb3.shared_prefixes import SharedPrefixes
from textenv.packed_masks import PackedMasks


def states_of(count, seed=0, prompt_tokens=3, response_tokens=6, vocab_size=NAMED, branches=4):
    """Random states of few responses that share beginnings, and actions taken in them."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(vocab_size, size=rng.integers(1, prompt_tokens + 1)).tolist() for _ in range(branches)]
    trunk = rng.integers(vocab_size, size=response_tokens).tolist()
    rows = []
    for _ in range(count):
        response = trunk[: rng.integers(response_tokens)]
        if rng.random() < 0.3 and response:
            response = [*response[:-1], int(rng.integers(vocab_size))]
        rows.append((prompts[rng.integers(branches)], response))
    ids, mask = padded(rows, prompt_tokens, response_tokens)
    observations = {"input_ids": torch.as_tensor(ids), "attention_mask": torch.as_tensor(mask)}
    return observations, torch.as_tensor(rng.integers(vocab_size, size=count))


def sb3_policy(network, share_prefixes=True, vocab_size=ROWS, response_tokens=6, columns=9, **options):
    observation_space = spaces.Dict(
        input_ids=spaces.Box(0, vocab_size - 1, (columns,), np.int32),
        attention_mask=spaces.Box(0, 1, (columns,), np.int8),
    )
    return LanguageModelActorCriticPolicy(
        observation_space,
        spaces.Discrete(vocab_size),
        lambda _: 1e-3,
        network,
        response_tokens=response_tokens,
        share_prefixes=share_prefixes,
        **options,
    )


NETWORKS = {
    "trunk": lambda folder: moved_policy(folder),
    "separate": lambda folder: moved_policy(folder, value="separate"),
    "all weights": lambda folder: moved_policy(folder, lora_rank=None),
    "temperature": lambda folder: moved_policy(folder, temperature=0.6),
    "table": lambda folder: moved_table(),
    "recurrent": lambda folder: GRUPolicy(ROWS, seed=2),
}
EVERY = pytest.mark.parametrize("kind", NETWORKS)


def moved_table():
    table = TablePolicy(np.random.default_rng(0).normal(size=(6, ROWS)), prompt_tokens=3)
    with torch.no_grad():
        table.values.normal_(generator=torch.Generator().manual_seed(0))
    return table


class TestSharedPrefixes:
    @pytest.mark.parametrize("seed", range(6))
    def test_every_state_is_found_where_it_is_said_to_be(self, seed):
        observations, _ = states_of(60, seed, vocab_size=3)
        ids, mask = (observations[key].numpy() for key in ("input_ids", "attention_mask"))
        shared = SharedPrefixes.of(ids, mask)

        def text(row, end):
            return [(column, int(ids[row, column])) for column in range(end + 1) if mask[row, column]]

        texts = [text(row, column) for row, column in enumerate(shared.columns)]
        for row in range(len(ids)):
            assert text(shared.rows[shared.row_of[row]], shared.columns[row]) == texts[row]
        # And none too many: a kept row is no beginning of any other.
        kept = [texts[row] for row in shared.rows]
        assert not any(a == b[: len(a)] for i, a in enumerate(kept) for j, b in enumerate(kept) if i != j)
        assert len(kept) < len(ids) / 2

    def test_not_shared_is_one_row_each(self):
        observations, _ = states_of(20)
        shared = SharedPrefixes.of(*(observations[key].numpy() for key in ("input_ids", "attention_mask")), False)
        assert shared.rows.tolist() == shared.row_of.tolist() == list(range(20))


def close(one, other):
    """Up to float32's rounding of the tensor's largest entries, which the sums of a gradient hold and lose again."""
    largest = float(other.detach().abs().max())
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5 * max(1.0, largest))


class TestEvaluateActions:
    def results(self, network, share_prefixes, action_masks=None, count=40):
        policy = sb3_policy(network, share_prefixes)
        observations, actions = states_of(count)
        values, logprobs, entropies = policy.evaluate_actions(observations, actions, action_masks)
        weights = torch.linspace(0.5, 1.5, count)
        loss = (weights * logprobs).sum() + (weights.flip(0) * values.flatten()).sum()
        if entropies is not None:
            loss = loss + 0.3 * (weights.sqrt() * entropies).sum()
        policy.optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]
        return [values, logprobs, *([] if entropies is None else [entropies])], gradients

    @EVERY
    @pytest.mark.parametrize("masked", [False, True])
    def test_sharing_changes_nothing(self, kind, masked, tiny_model):
        if kind == "recurrent" and masked:
            pytest.skip("it takes no masks")
        network, masks = NETWORKS[kind](tiny_model), None
        if masked:
            masks = torch.as_tensor(np.random.default_rng(1).random((40, ROWS)) < 0.6).float()
            masks[torch.arange(40), states_of(40)[1]] = 1.0
        for together, alone in zip(*(self.results(network, share, masks) for share in (True, False)), strict=True):
            assert len(together) == len(alone) > 1
            for one, other in zip(together, alone, strict=True):
                close(one, other)

    @EVERY
    def test_it_is_what_the_policy_says_of_whole_responses(self, kind, tiny_model):
        """The states of three responses, token by token, against `evaluate` of the responses."""
        network, responses = NETWORKS[kind](tiny_model), [[5, 9, 2, 7], [3], [8, 8, 1, 4, 6, 2]]
        ids, mask = map(torch.as_tensor, padded([([4, 5], r) for r in responses], 3, 6))
        states = [([4, 5], r[:t]) for r in responses for t in range(len(r))]
        observations = dict(
            zip(("input_ids", "attention_mask"), map(torch.as_tensor, padded(states, 3, 6)), strict=True)
        )
        actions = torch.as_tensor([token for r in responses for token in r])
        values, logprobs, entropies = sb3_policy(network).evaluate_actions(observations, actions)
        whole, real = network.evaluate(ids, mask, 6), mask[:, 3:].bool()
        torch.testing.assert_close(logprobs, whole.logprobs[real], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values.flatten(), whole.values[real], rtol=1e-4, atol=1e-5)
        if kind == "recurrent":
            assert entropies is None  # it cannot differentiate them, so that Stable-Baselines3 estimates
        else:
            torch.testing.assert_close(entropies, whole.entropies[real], rtol=1e-4, atol=1e-5)

    def test_passes_and_tokens(self, tiny_model):
        """All states of four responses of 6 tokens after 2: four rows of 7 tokens, against 24 rows of 2 to 7."""
        responses = [[first, 9, 2, 7, 5, 1] for first in range(4)]
        states = [([4, 5], r[:t]) for r in responses for t in range(6)]
        order = np.random.default_rng(0).permutation(len(states))
        ids, mask = map(torch.as_tensor, padded([states[i] for i in order], 3, 6))
        network, tokens = moved_policy(tiny_model), []
        actions = torch.zeros(len(states), dtype=torch.long)
        network.evaluate(ids, mask, 6)  # the trial of packed passes
        for share_prefixes in (True, False):
            with Passes(network) as passes:
                sb3_policy(network, share_prefixes).evaluate_actions(
                    {"input_ids": ids, "attention_mask": mask}, actions
                )
            assert len(passes.shapes) == 1
            tokens.append(passes.tokens)
        assert tokens == [4 * 7, 4 * (2 + 3 + 4 + 5 + 6 + 7)]

    def test_long_minibatches_go_in_parts(self, tiny_model, monkeypatch):
        network = moved_policy(tiny_model)
        whole = self.results(network, True)
        monkeypatch.setattr(LanguageModelPolicy, "tokens_per_pass", 20)
        parts = self.results(network, True)
        for one, other in zip(whole[0] + whole[1], parts[0] + parts[1], strict=True):
            close(one, other)


def rolled_out(model, steps):
    """One rollout without an update."""
    model._setup_learn(1)
    callback = CallbackList([])
    callback.init_callback(model)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, steps)
    return model.rollout_buffer


def toy_table(envs):
    return policy_kwargs(TablePolicy(np.random.default_rng(0).normal(size=(TOY.horizon, TOY.vocab_size))), envs)


class TestRollouts:
    def model(self, folder, kind="trunk", **settings):
        envs = SB3VecEnv(lm_envs(folder, num_envs=6, stop=list("aeiourst ")))
        kwargs = policy_kwargs(NETWORKS[kind](folder), envs)
        return lm_model(PPO, folder, envs=envs, policy_kwargs=kwargs, **{"n_steps": 15, "batch_size": 90} | settings)

    @pytest.mark.parametrize("kind", ["trunk", "separate", "all weights", "temperature"])
    def test_ratios_are_one_before_the_first_step(self, kind, tiny_model):
        """Case 9, over resets of single rows: what was kept in rollouts is what the update computes."""
        model = self.model(tiny_model, kind)
        buffer = rolled_out(model, 15)
        starts = buffer.episode_starts[1:]
        assert 0 < starts.mean() < 1 and (starts.mean(1) < 1).all()  # rows begin anew at different steps
        (data,) = buffer.get(None)
        values, logprobs, _ = model.policy.evaluate_actions(data.observations, data.actions.long().flatten())
        assert abs(torch.exp(logprobs - data.old_log_prob) - 1).max() < 1e-4
        torch.testing.assert_close(values.flatten(), data.old_values, rtol=1e-4, atol=1e-4)

    def test_ratios_of_a_table(self):
        envs = toy_vec_env()
        model = toy_model(PPO, envs=envs, n_steps=12, batch_size=96)
        (data,) = rolled_out(model, 12).get(None)
        values, logprobs, entropies = model.policy.evaluate_actions(data.observations, data.actions.long().flatten())
        torch.testing.assert_close(logprobs, data.old_log_prob)
        torch.testing.assert_close(entropies, torch.full((96,), float(np.log(6))))
        assert not values.any()

    def test_every_token_is_read_once(self, tiny_model):
        """The tokens of the policy's own passes: each prompt when a row begins with it, then one for each step."""
        model = self.model(tiny_model)
        rolled_out(model, 2)  # trials of caches and packed passes
        network = model.policy.network
        with Passes(network) as passes:
            model.env.envs.leash.policy_logprobs = None  # the toll's reference reads as much again
            buffer = rolled_out_without_toll(model, 15)
        ids, mask = buffer.observations["input_ids"], buffer.observations["attention_mask"]
        assert (ids[0] != ids[1]).any()
        prompts = (mask * (buffer.episode_starts > 0)[..., None]).sum()
        last = model._last_obs
        begun = (last["attention_mask"] * model._last_episode_starts[:, None]).sum()
        grown = (buffer.episode_starts[1:] == 0).sum() + (~model._last_episode_starts).sum()
        # Rows that are filled in one pass are padded to the longest new prompt among them.
        assert prompts + begun + grown <= passes.tokens < 1.6 * (prompts + begun + grown)
        assert passes.tokens < 0.5 * (mask.sum() + last["attention_mask"].sum())

    def test_the_last_value_is_that_of_a_full_pass(self, tiny_model):
        model = self.model(tiny_model)
        rolled_out(model, 4)
        last = {key: torch.as_tensor(value) for key, value in model._last_obs.items()}
        with torch.no_grad():
            stepped = model.policy.predict_values(last)
        torch.testing.assert_close(stepped, model.policy.predict_values(last), rtol=1e-4, atol=1e-5)
        assert stepped.shape == (6, 1) and stepped.abs().max() > 0.01

    @EVERY
    def test_nothing_comes_after_the_budget(self, kind, tiny_model):
        """Case 38, should anybody ask all the same: the value of a full response is 0."""
        policy = sb3_policy(NETWORKS[kind](tiny_model))
        ids, mask = map(torch.as_tensor, padded([([4, 5], [1] * 6), ([4, 5], [1] * 5)], 3, 6))
        values = policy.predict_values({"input_ids": ids, "attention_mask": mask})
        assert values[0] == 0
        assert kind == "recurrent" or values[1] != 0

    def test_predictions_come_from_the_seed(self):
        envs = toy_vec_env()
        model = toy_model(PPO, envs=envs, n_steps=8, batch_size=64)
        observation = envs.reset()
        actions = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            actions.append(model.predict(observation)[0])
        assert (actions[0] == actions[1]).all() and (actions[0] != actions[2]).any()
        single = {key: value[0] for key, value in observation.items()}
        assert model.predict(single, deterministic=True)[0].shape == ()

    def test_frequencies_are_the_distributions(self):
        envs = toy_vec_env(num_envs=3000)
        settings = {"policy_kwargs": toy_table(envs), "seed": 0, "device": "cpu", "n_steps": 2, "batch_size": 6000}
        model = PPO(LanguageModelActorCriticPolicy, envs, **settings)
        observations = {key: torch.as_tensor(value) for key, value in envs.reset().items()}
        actions, _, logprobs = model.policy(observations)
        distribution = model.policy.get_distribution(observations)
        probabilities = distribution.distribution.probs[0].detach().numpy()
        assert abs(np.bincount(actions, minlength=6) / 3000 - probabilities).max() < 4 * 0.5 / np.sqrt(3000)
        torch.testing.assert_close(logprobs, distribution.log_prob(actions).detach())
        again = np.bincount(distribution.sample(), minlength=6) / 3000
        assert abs(again - probabilities).max() < 4 * 0.5 / np.sqrt(3000)


def rolled_out_without_toll(model, steps):
    """Of a toll that asks nobody."""
    with pytest.warns(UserWarning, match="no policy attached"):
        return rolled_out(model, steps)


class TestDistribution:
    def test_it_is_torchs_where_torch_has_one(self):
        generator = torch.Generator().manual_seed(0)
        logits, others = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
        actions = torch.arange(5)
        ours, theirs = TokenDistribution(logits), Categorical(logits=logits)
        torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
        torch.testing.assert_close(ours.entropy(), theirs.entropy())
        assert (ours.mode() == theirs.mode).all()
        kl = kl_divergence(ours.distribution, TokenDistribution(others).distribution)
        torch.testing.assert_close(kl, kl_divergence(theirs, Categorical(logits=others)))

    def test_forbidden_tokens_have_no_part_in_any_derivative(self):
        logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
        masks = np.ones((3, 6), dtype=bool)
        masks[:, 2:4] = False
        distribution = TokenDistribution(logits, PackedMasks.of(masks))
        reduced = Categorical(logits=logits[:, [0, 1, 4, 5]])
        torch.testing.assert_close(distribution.entropy(), reduced.entropy())
        assert not set(distribution.sample().tolist()) & {2, 3}
        old = TokenDistribution(logits.detach(), PackedMasks.of(masks))
        kl = kl_divergence(distribution.distribution, old.distribution).sum()
        (first,) = torch.autograd.grad(kl + distribution.entropy().sum(), logits, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), logits)
        assert torch.isfinite(first).all() and torch.isfinite(second).all()
        assert not first[:, 2:4].any() and first.any() and second.any()
        distribution.apply_masking(None)
        torch.testing.assert_close(distribution.entropy(), Categorical(logits=logits).entropy())
        distribution.apply_masking(masks.astype(np.float32))
        torch.testing.assert_close(distribution.entropy(), reduced.entropy())

    def test_a_rounded_simplex_of_a_hundred_thousand_is_no_error(self):
        """Case 37: torch's own distribution refuses these, as probabilities."""
        logits = 8 * torch.randn(4, 152_000, generator=torch.Generator().manual_seed(0))
        distribution = TokenDistribution(logits)
        actions = distribution.sample()
        exact = torch.log_softmax(logits.double(), -1)[torch.arange(4), actions]
        torch.testing.assert_close(distribution.log_prob(actions).double(), exact, rtol=1e-5, atol=1e-4)


class TestMadeOf:
    def test_only_what_trains_is_optimised_and_kept(self, tiny_model):
        model = lm_model(PPO, tiny_model, n_steps=8, batch_size=64, n_epochs=2, learning_rate=1e-2)
        network = model.policy.network
        before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
        trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
        optimised = sum(len(group["params"]) for group in model.policy.optimizer.param_groups)
        assert optimised == len(trained) == len(list(model.policy.parameters())) < len(before)
        assert {f"network.{name}" for name in trained} == set(model.policy.state_dict())
        model.learn(64)
        moved = {name for name, parameter in network.named_parameters() if not torch.equal(parameter, before[name])}
        assert moved == trained

    def test_a_function_or_a_class_makes_the_policy(self):
        envs = toy_vec_env()
        kwargs = policy_kwargs(tiny_transformer, envs, vocab_size=6, seed=3)
        model = PPO(LanguageModelActorCriticPolicy, envs, policy_kwargs=kwargs, n_steps=4, batch_size=32, device="cpu")
        ours = tiny_transformer(6, seed=3)
        for name, parameter in ours.named_parameters():
            assert torch.equal(parameter, dict(model.policy.network.named_parameters())[name])

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"model": "tiny", "net_arch": [64]}, TypeError, "got 'net_arch'"),
            ({"model": "tiny", "device": "cuda"}, TypeError, "given to the algorithm"),
            ({"model": 3}, TypeError, "got int"),
            ({"model": torch.nn.Linear(2, 2)}, TypeError, "got Linear"),
            (
                {"model": TablePolicy(np.zeros((8, 6))), "lora_rank": 4},
                TypeError,
                r"takes no settings, got \['lora_rank",
            ),
            ({"model": TablePolicy(np.zeros((8, 6)))}, ValueError, "`response_tokens` should be the task's budget"),
            ({"model": tiny_transformer, "vocab_size": 7}, ValueError, "one output per action, 6, got 7"),
        ],
    )
    def test_what_makes_no_policy_is_refused(self, kwargs, error, message):
        with pytest.raises(error, match=message):
            PPO(LanguageModelActorCriticPolicy, toy_vec_env(), policy_kwargs=kwargs, n_steps=4, batch_size=32)

    def test_spaces_of_others_are_refused(self):
        with pytest.raises(TypeError, match="should have the keys"):
            PPO(LanguageModelActorCriticPolicy, gym.make("CartPole-v1"), device="cpu")

    def test_a_plain_policy_cannot_be_attached(self):
        from textenv.agents.sb3 import attach

        model = PPO("MultiInputPolicy", toy_vec_env(), n_steps=4, batch_size=32, device="cpu")
        with pytest.raises(TypeError, match="should have a LanguageModelActorCriticPolicy"):
            attach(model)

    def test_full_states_have_no_next_token(self):
        ids, mask = map(torch.as_tensor, padded([([4], [1] * 6)], 3, 6))
        with pytest.raises(ValueError, match="whose response fills its budget"):
            sb3_policy(moved_table()).evaluate_actions({"input_ids": ids, "attention_mask": mask}, torch.tensor([1]))
