"""`policy.act`: tokens from the policy's own distribution, from one uniform number per row, each token read once."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch
from agent_helpers import lm_envs
from lm_helpers import NAMED, ROWS, GRUPolicy, padded, random_rows

from textenv.agents import LanguageModelPolicy, TablePolicy
from textenv.agents.acting import act
from textenv.agents.policy import PolicyLogprobs
from textenv.lm import stepping
from textenv.packed_masks import PackedMasks

HALF = np.log([0.5, 0.25, 0.25])


class Uniforms(np.random.Generator):
    """A generator whose uniform numbers are known."""

    def __init__(self, *numbers):
        super().__init__(np.random.PCG64(0))
        self.numbers = list(numbers)

    def random(self, size):
        taken, self.numbers = self.numbers[:size], self.numbers[size:]
        return np.array(taken)


@pytest.fixture(scope="module")
def policy(tiny_model):
    """With adapters that do something, at a temperature of its own."""
    made = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=2, temperature=0.8)
    with torch.no_grad():
        for name, parameter in made.lm.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    return made


def observations(prompts=(4, 1, 3, 6), responses=(2, 3, 0, 1)):
    ids, mask = padded(random_rows(prompts, responses, NAMED), 6, 4)
    return {"input_ids": ids, "attention_mask": mask}


@contextlib.contextmanager
def passes_of(policy):
    """The shapes of the token ids that go through its trunk in the block."""
    shapes = []
    handle = policy.lm.model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    handle.remove()


def rows_of(count, length=1):
    """Observations of a table: `length` tokens, no response yet."""
    ids = np.zeros((count, length + 2), dtype=np.int32)
    return {"input_ids": ids, "attention_mask": (np.arange(length + 2) < length).astype(np.int8) + 0 * ids}


class TestDraws:
    @pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (0.999, 2)])
    def test_inverse_cumulative_distribution(self, uniform, token):
        """Probabilities 1/2, 1/4, 1/4 part [0, 1) at 0.5 and 0.75."""
        table = TablePolicy([HALF])
        assert act(table, rows_of(2), generator=Uniforms(uniform, 0.6)).tolist() == [token, 1]

    def test_rows_do_not_share_their_numbers(self):
        table, numbers = TablePolicy([HALF]), [0.1, 0.6, 0.9, 0.3]
        together = table.act(rows_of(4), generator=Uniforms(*numbers))
        assert together.tolist() == [0, 1, 2, 0]
        assert together.dtype == np.int64

    def test_most_likely_token(self):
        table = TablePolicy([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
        assert table.act(rows_of(3), deterministic=True).tolist() == [1, 1, 1]
        after_one = rows_of(3)
        after_one["attention_mask"][:, 1] = 1
        assert table.act(after_one, deterministic=True).tolist() == [0, 0, 0]

    def test_single_observation_gives_an_int(self, policy):
        single = {key: value[1] for key, value in observations().items()}
        token = policy.act(single, generator=np.random.default_rng(3))
        many = policy.act({key: value[None] for key, value in single.items()}, generator=np.random.default_rng(3))
        assert type(token) is int and token == many[0]

    def test_frequencies_are_the_policys_probabilities(self, policy):
        rows = {key: np.repeat(value[:1], 4000, axis=0) for key, value in observations().items()}
        drawn = np.bincount(policy.act(rows, generator=np.random.default_rng(0)), minlength=ROWS) / 4000
        log_pi = PolicyLogprobs(policy).next_logprobs({key: value[:1] for key, value in rows.items()})[0]
        assert abs(drawn - np.exp(log_pi)).max() < 4 * 0.5 / np.sqrt(4000)  # four standard deviations at the most
        hotter = np.exp(0.8 * log_pi) / np.exp(0.8 * log_pi).sum()  # the temperature forgotten
        assert abs(drawn - hotter).max() > 2 * abs(drawn - np.exp(log_pi)).max()
        assert not drawn[NAMED:].any()

    def test_seeds_decide_and_torch_is_left_alone(self, policy):
        before = torch.get_rng_state()
        rows = observations()
        first, second = (policy.act(rows, generator=np.random.default_rng(1)) for _ in range(2))
        assert (first == second).all()
        generator = np.random.default_rng(1)
        draws = np.stack([policy.act(rows, generator=generator) for _ in range(20)])
        assert (draws[0] == first).all() and len(np.unique(draws, axis=0)) > 10
        unseeded = np.stack([policy.act(rows) for _ in range(20)])
        assert len(np.unique(unseeded, axis=0)) > 10
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("generator", [0, torch.Generator(), np.random.RandomState(0)], ids=type)
    def test_other_generators_are_refused(self, policy, generator):
        with pytest.raises(TypeError, match=r"numpy\.random\.Generator, got .*default_rng\(seed\)"):
            policy.act(observations(), generator=generator)

    def test_any_policy(self):
        torch.manual_seed(0)
        gru, rows = GRUPolicy(NAMED), observations()
        ids, mask = (torch.as_tensor(value) for value in rows.values())
        assert act(gru, rows, deterministic=True).tolist() == gru.next_logits(ids, mask).argmax(1).tolist()


class TestMasks:
    def test_only_allowed_tokens(self):
        """Without token 0 the other two are left with 1/2 each, so that 0.4 is token 1 and no longer 0."""
        allowed = PackedMasks.of(np.array([[False, True, True], [True, True, True]]))
        found = TablePolicy([HALF]).act(rows_of(2), generator=Uniforms(0.4, 0.4), action_masks=allowed)
        assert found.tolist() == [1, 0]

    def test_by_row_in_chunks_and_for_one(self, policy, monkeypatch):
        rows, wanted = observations(), np.array([5, 17, 50, 33])
        allowed = PackedMasks.of(np.arange(ROWS) == wanted[:, None])
        assert (policy.act(rows, action_masks=allowed) == wanted).all()
        monkeypatch.setattr(stepping, "CHUNK", 3)
        assert (policy.act(rows, action_masks=allowed) == wanted).all()
        single = {key: value[2] for key, value in rows.items()}
        assert policy.act(single, action_masks=allowed[2]) == 50

    def test_kept_logits_stay_unmasked(self, policy):
        rows = observations()
        before = policy.stepper().next_logprobs(rows)
        policy.act(rows, action_masks=PackedMasks.of(np.arange(ROWS) == np.full((4, 1), 7)))
        np.testing.assert_array_equal(policy.stepper().next_logprobs(rows), before)


class TestSteps:
    def test_same_tokens_as_whole_passes(self, policy, tiny_model):
        """A policy that reads whole prefixes draws the same from the same numbers, in an environment that resets."""
        envs, generators = lm_envs(tiny_model, kl_coef=None), [np.random.default_rng(5) for _ in range(2)]
        rows, _ = envs.reset(seed=0)
        ends = 0
        for _ in range(25):
            tokens = policy.act(rows, generator=generators[0])
            ids, mask = (torch.as_tensor(rows[key]) for key in ("input_ids", "attention_mask"))
            with torch.no_grad(), policy.arithmetic():
                probabilities = policy.next_logits(ids, mask).double().softmax(1).numpy()
            cumulative = probabilities.cumsum(1)
            uniforms = generators[1].random(len(tokens))
            inside = abs(cumulative - uniforms[:, None]).min(1) > 1e-4  # else rounding may decide
            expected = (cumulative < uniforms[:, None]).sum(1)
            assert (tokens == expected)[inside].all() and inside.sum() > len(inside) / 2
            rows, _, terminations, truncations, _ = envs.step(tokens)
            ends += (terminations | truncations).sum()
        assert ends > 10

    def test_a_step_with_kl_costs_a_pass_of_the_policy_and_one_of_the_reference(self, policy, tiny_model):
        envs = lm_envs(tiny_model, num_envs=4, stop=[], max_response_tokens=8, prompts=["the a", "good", "a bc"])
        envs.attach_policy(PolicyLogprobs(policy), policy.reference)
        rows, _ = envs.reset(seed=0)
        rows, *_ = envs.step(policy.act(rows, generator=np.random.default_rng(0)))
        for seed in range(1, 4):
            with passes_of(policy) as shapes:
                rows, *_ = envs.step(policy.act(rows, generator=np.random.default_rng(seed)))
            assert shapes == [(4, 1), (4, 1)]

    def test_wrappers_read_what_acting_has_read(self, policy):
        rows, logprobs = observations(), PolicyLogprobs(policy)
        tokens = policy.act(rows, generator=np.random.default_rng(0))
        with passes_of(policy) as shapes:
            found = logprobs.stepper()(rows, tokens)
        assert shapes == []
        np.testing.assert_allclose(found, logprobs(rows, tokens), atol=1e-5)

    def test_acting_after_an_update_uses_the_new_weights(self, tiny_model):
        policy, rows = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=None), observations()
        stepper = policy.stepper()
        before = stepper.next_logprobs(rows)
        optimizer = torch.optim.AdamW(policy.lm.model.parameters(), lr=0.1, fused=True)
        for parameter in policy.lm.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        after = stepper.next_logprobs(rows)
        np.testing.assert_allclose(after, PolicyLogprobs(policy).next_logprobs(rows), atol=1e-4)
        assert abs(after[:, :NAMED] - before[:, :NAMED]).max() > 0.1
        expected = after.argmax(1)
        assert (policy.act(rows, deterministic=True) == expected).all()

    def test_copies_act_with_their_own_weights_and_carry_no_cache(self, policy):
        rows = observations()
        policy.act(rows)
        assert policy.stepper().nbytes > 0
        for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
            assert other.stepper().nbytes == 0
            assert other.stepper().lm is other.lm
            assert (other.act(rows, deterministic=True) == policy.act(rows, deterministic=True)).all()

    def test_without_a_stepper_the_policy_itself_is_asked(self):
        logprobs = PolicyLogprobs(TablePolicy([HALF]))
        assert logprobs.stepper() is logprobs


class TestResponses:
    def test_log_probabilities_of_whole_responses(self, policy):
        rows = observations()
        found = policy.response_logprobs(rows["input_ids"], rows["attention_mask"], 4)
        expected = PolicyLogprobs(policy).response_logprobs(rows["input_ids"], rows["attention_mask"], 4)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert found.shape == (4, 4) and found.dtype == np.float64
        first = {key: value[:1] for key, value in observations(responses=(0, 0, 0, 0)).items()}
        np.testing.assert_allclose(found[0, 0], policy.stepper()(first, rows["input_ids"][:1, 6])[0], atol=1e-5)

    def test_of_a_table(self):
        table = TablePolicy([HALF, HALF[::-1]])
        ids, mask = np.array([[9, 0, 1], [9, 2, 0]]), np.array([[1, 1, 1], [1, 1, 0]])
        found = table.response_logprobs(ids, mask, 2)
        np.testing.assert_allclose(found, np.log([[0.5, 0.25], [0.25, 1.0]]), atol=1e-6)
        allowed = PackedMasks(np.packbits([[1, 1, 1], [0, 1, 1]], axis=1), np.array([[0, 1], [0, 0]]), 3)
        masked = table.response_logprobs(ids, mask, 2, allowed)
        np.testing.assert_allclose(masked[0], np.log([0.5, 1 / 3]), atol=1e-6)  # 1/4 of the 3/4 that are left
