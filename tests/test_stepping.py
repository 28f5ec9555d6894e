"""Incremental decoding: equal to full passes for every architecture, in every autoreset mode, each token read once."""

import copy
import pickle
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, WINDOW, mamba, tiny
from gymnasium.vector import AutoresetMode
from lm_helpers import padded, random_rows

from textenv import TextGenerationEnv, TextGenerationVectorEnv, TextTask
from textenv.lm import LanguageModel, LazyLanguageModel, Stepper, load_causal_lm, stepping
from textenv.lm.adapters import AdapterFree, add_lora
from textenv.lm.cache import Place, RowCache, attention_masks, layer_types, plain_attention, why_not_cached
from textenv.lm.stepping import EMPTY, _blocks, _new_tokens
from textenv.lm.weights import Fingerprint

STOP = 0
BY_NAME = pytest.mark.parametrize("name", ARCHITECTURES)
MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)


class Numbers:
    """Token ids as text."""

    def encode(self, text):
        return [int(part) for part in text.split()]

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


def task(response_tokens=8):
    """Prompts of 1 to 9 random tokens, so that rows run past `WINDOW` at different steps."""
    prompts = [prompt for prompt, _ in random_rows((9, 1, 6, 3, 7), (0,) * 5, VOCAB, seed=1)]
    return TextTask.build(
        prompts=prompts,
        scorer=lambda prompts, responses: np.zeros(len(prompts)),
        tokenizer=Numbers(),
        vocab_size=VOCAB,
        stop_ids=[STOP],
        max_response_tokens=response_tokens,
    )


def language_model(module, **options):
    return LanguageModel(module, source="test", **options)


@pytest.fixture
def lm():
    return language_model(tiny("llama"))


def walk(envs, steps, seed=0, stop=0.15):
    """Step a vector environment at random, resetting by hand where it has to be; yields what a KL wrapper sees."""
    rng = np.random.default_rng(seed)
    observations, _ = envs.reset(seed=seed)
    for _ in range(steps):
        actions = np.where(rng.random(envs.num_envs) < stop, STOP, rng.integers(1, VOCAB, envs.num_envs))
        yield observations, actions
        observations, _, terminations, truncations, _ = envs.step(actions)
        ended = terminations | truncations
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            observations, _ = envs.reset(options={"reset_mask": ended})


def alone(observations, row):
    """One row of a batch without its padding."""
    real = observations["attention_mask"][row].astype(bool)
    return {"input_ids": observations["input_ids"][[row]][:, real], "attention_mask": np.ones((1, real.sum()), np.int8)}


class Passes:
    """The shapes (R, Q) of the token ids that go through a model, as they go."""

    def __init__(self, lm):
        self.shapes = []
        lm.load().model.base_model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module, _args, kwargs):
        self.shapes.append(tuple(kwargs["input_ids"].shape))

    def take(self):
        shapes, self.shapes = self.shapes, []
        return shapes


def prepared(lm, ids, mask):
    """A stepper past the trial of its model, which runs tokens of its own."""
    stepper = lm.stepper()
    stepper.states(ids, mask)
    stepper.clear()
    return stepper


class TestArchitectures:
    @BY_NAME
    @MODES
    def test_equals_full_passes(self, name, mode):
        lm = language_model(tiny(name), temperature=0.7, named_size=VOCAB - 5)
        envs = TextGenerationVectorEnv(4, task(), autoreset_mode=mode)
        stepper, resets, longest, previous = lm.stepper(), 0, 0, None
        for observations, actions in walk(envs, 24):
            actions = np.minimum(actions, VOCAB - 6)
            np.testing.assert_allclose(stepper(observations, actions), lm(observations, actions), atol=1e-4, rtol=0)
            lengths = observations["attention_mask"].sum(1)
            resets += 0 if previous is None else int((lengths < previous).sum())
            longest, previous = max(longest, lengths.max()), lengths
        assert stepper._cached
        assert resets > 8 and longest > 2 * WINDOW  # else it says little

    @BY_NAME
    def test_rows_alone_and_in_company(self, name):
        """A padded batch, a row without padding, and either of them step by step, are one distribution."""
        lm = language_model(tiny(name))
        many, one = lm.stepper(), lm.stepper()
        envs, entropies = TextGenerationVectorEnv(3, task(), autoreset_mode=AutoresetMode.SAME_STEP), []
        for observations, actions in walk(envs, 14, stop=0.1):
            single = {key: value[[1]] for key, value in observations.items()}
            found = [
                lm(observations, actions)[1],
                lm(alone(observations, 1), actions[[1]])[0],
                many(observations, actions)[1],
                one(single, actions[[1]])[0],
                one.next_logprobs(single)[0, actions[1]],
            ]
            np.testing.assert_allclose(found, found[0], atol=1e-4, rtol=0)
            log_pi = many.next_logprobs(observations)
            entropies.append(-(np.exp(log_pi) * log_pi).sum(1).mean())
        assert np.mean(entropies) < 0.85 * np.log(VOCAB)  # near uniform every prefix would look right

    @pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-sliding"])
    def test_attention_written_out_in_torch(self, name):
        """It adds its mask to the scores: a boolean one would add 1 where it should forbid."""
        lm = language_model(tiny(name, attention="eager"))
        stepper = lm.stepper()
        for observations, actions in walk(TextGenerationVectorEnv(3, task()), 14):
            np.testing.assert_allclose(stepper(observations, actions), lm(observations, actions), atol=1e-4, rtol=0)
        assert stepper._cached

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
    def test_bfloat16(self, name):
        """Steps and full passes round at other places, and miss the float32 numbers by the same: 0.01 to 0.05 nats."""
        lm, exact = language_model(tiny(name), dtype="bfloat16"), language_model(tiny(name))
        stepper, errors = lm.stepper(), []
        for observations, actions in walk(TextGenerationVectorEnv(4, task()), 20):
            truth = exact(observations, actions)
            errors.append([abs(model(observations, actions) - truth) for model in (stepper, lm)])
        by_steps, by_passes = np.mean(errors, axis=(0, 2))
        assert by_steps < 1.25 * by_passes and by_steps < 0.1
        assert np.max(errors) < 0.5
        assert stepper._cached
        assert {layer.keys.dtype for layer in stepper._cache.layers} == {torch.bfloat16}

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-sliding"])
    def test_on_a_gpu(self, name):
        """Products may be rounded to TF32 there, with 10 bits."""
        lm = language_model(tiny(name).to("cuda"))
        stepper = lm.stepper()
        for observations, actions in walk(TextGenerationVectorEnv(4, task()), 20):
            np.testing.assert_allclose(stepper(observations, actions), lm(observations, actions), atol=0.05, rtol=0)
        assert stepper._cache.layers[0].keys.is_cuda

    def test_soft_capped_attention_is_loaded_as_it_was_trained(self, tmp_path):
        """The fused kernel leaves Gemma 2's soft-capping out."""
        model = tiny("gemma2", attention="eager")
        model.config.attn_logit_softcapping = 0.5
        model.save_pretrained(tmp_path / "gemma")
        loaded = load_causal_lm(tmp_path / "gemma")
        ids = torch.arange(1, 9)[None]
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = 0.5
        assert torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)
        loaded.set_attn_implementation("sdpa")
        assert not torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-2)


class TestRows:
    def test_single_environment_with_a_time_limit(self, lm):
        env = gym.wrappers.TimeLimit(TextGenerationEnv(task()), max_episode_steps=3)
        stepper, rng = lm.stepper(), np.random.default_rng(0)
        observation, _ = env.reset(seed=0)
        for _ in range(12):
            row = {key: value[None] for key, value in observation.items()}
            action = rng.integers(1, VOCAB, 1)
            np.testing.assert_allclose(stepper(row, action), lm(row, action), atol=3e-5)
            observation, _, terminated, truncated, _ = env.step(int(action[0]))
            if terminated or truncated:
                observation, _ = env.reset()

    def test_any_order_any_number_any_width(self, lm):
        ids, mask = padded(random_rows((3, 8, 1, 5), (4, 0, 2, 5), VOCAB), 8, 5)
        stepper = lm.stepper()
        for rows, columns in (([0, 1, 2, 3], 13), ([3, 2, 1, 0], 13), ([1, 1], 13), ([0], 13), ([0, 2], 12), ([2], 20)):
            observations = {
                "input_ids": np.pad(ids[rows], ((0, 0), (0, 7)))[:, :columns],
                "attention_mask": np.pad(mask[rows], ((0, 0), (0, 7)))[:, :columns],
            }
            actions = np.arange(len(rows))
            np.testing.assert_allclose(stepper(observations, actions), lm(observations, actions), atol=3e-5)

    def test_cut_back_and_changed_rows(self, lm):
        """A row may lose tokens, or change one in the middle."""
        ids, mask = padded(random_rows((4, 6), (5, 5), VOCAB), 6, 5)
        stepper, actions = lm.stepper(), np.array([5, 6])
        for change in (lambda: None, lambda: mask[:, -2:].fill(0), lambda: ids[:, 7].fill(9), lambda: ids[0].fill(1)):
            change()
            observations = {"input_ids": ids, "attention_mask": mask}
            np.testing.assert_allclose(stepper(observations, actions), lm(observations, actions), atol=3e-5)

    @pytest.mark.parametrize("fill", [0, 50, VOCAB - 1])
    def test_ids_in_padding_move_nothing_by_a_bit(self, lm, fill):
        rows = random_rows((3, 6), (2, 5), VOCAB)
        found = []
        for content in (7, fill):
            ids, mask = padded(rows, 6, 5, fill=content)
            found.append(lm.stepper().next_logprobs({"input_ids": ids, "attention_mask": mask}))
        np.testing.assert_array_equal(*found)

    def test_callers_arrays_are_left_alone_and_not_kept(self, lm):
        ids, mask = padded(random_rows((3, 6), (2, 5), VOCAB), 6, 5)
        ids.flags.writeable = mask.flags.writeable = False
        stepper, actions = lm.stepper(), np.array([1, 2])
        before = stepper({"input_ids": ids, "attention_mask": mask}, actions)
        other = ids.copy()
        other[:] = 3  # environments may write into the array that they gave out
        stepper({"input_ids": other, "attention_mask": mask}, actions)
        np.testing.assert_allclose(stepper({"input_ids": ids, "attention_mask": mask}, actions), before, atol=1e-5)

    def test_a_row_without_tokens_is_refused(self, lm):
        ids, mask = padded(random_rows((2, 3), (1, 1), VOCAB), 3, 1)
        mask[1] = 0
        with pytest.raises(ValueError, match=r"at least one token, got none in row 1.*BOS"):
            lm.stepper()({"input_ids": ids, "attention_mask": mask}, np.array([0, 0]))

    def test_small_passes_give_the_same(self, lm, monkeypatch):
        ids, mask = padded(random_rows((3, 8, 1, 5, 8), (4, 0, 2, 5, 1), VOCAB), 8, 5)
        observations = {"input_ids": ids, "attention_mask": mask}
        whole, counted = prepared(lm, ids, mask).next_logprobs(observations), prepared(lm, ids, mask)
        monkeypatch.setattr(stepping, "TOKENS_PER_PASS", {"cpu": 20})
        monkeypatch.setattr(stepping, "CHUNK", 2)
        passes = Passes(lm)
        np.testing.assert_allclose(counted.next_logprobs(observations), whole, atol=1e-5)
        assert passes.take() == [(2, 7), (2, 9), (1, 10)]

    def test_temperature_and_unnamed_ids_are_in_the_distribution(self):
        module, rows = tiny("qwen2"), padded(random_rows((4, 2), (1, 3), VOCAB), 4, 3)
        observations = dict(zip(("input_ids", "attention_mask"), rows, strict=True))
        plain = language_model(module).stepper().next_logprobs(observations).astype(float)
        lm = language_model(module, temperature=0.6, named_size=90)
        stepper = lm.stepper()
        expected = plain[:, :90] / 0.6
        expected -= np.log(np.exp(expected).sum(1, keepdims=True))
        found = stepper.next_logprobs(observations)
        np.testing.assert_allclose(found[:, :90], expected, atol=1e-5)
        assert np.isneginf(found[:, 90:]).all()
        lm.temperature = 1.0  # logits are kept, but those of another distribution are not used
        assert abs(stepper.next_logprobs(observations)[:, :90] - expected).max() > 0.1


class TestWork:
    def test_each_token_is_read_once(self, lm):
        ids, mask = padded(random_rows((2, 4, 4), (5, 5, 5), VOCAB), 4, 5)
        shown = mask.copy()
        shown[:, 4:] = 0
        stepper, passes = prepared(lm, ids, shown), Passes(lm)
        stepper.states(ids, shown)
        assert passes.take() == [(3, 4)]  # the prompts
        for column in range(4, 8):
            stepper.states(ids, shown)
            assert passes.take() == []  # nothing new
            shown[:, column] = 1
            stepper.states(ids, shown)
            assert passes.take() == [(3, 1)]
        ids[1], shown[1] = 11, [0, 0, 1, 1, 0, 0, 0, 0, 0]  # a new episode on one row, while the others go on
        shown[[0, 2], 8] = 1
        stepper.states(ids, shown)
        assert passes.take() == [(2, 1), (1, 2)]
        ids[1, 3], ids[2, 7] = 12, 13  # what still agrees is kept
        stepper.states(ids, shown)
        assert passes.take() == [(1, 1), (1, 2)]

    def test_cost_of_a_step_in_an_environment(self, lm):
        """Prompts, then exactly the tokens that were added: in SAME_STEP mode a reset comes with a new prompt."""
        envs = TextGenerationVectorEnv(4, task(), autoreset_mode=AutoresetMode.SAME_STEP)
        stepper, passes, previous, counted = None, None, None, 0
        for observations, actions in walk(envs, 20):
            if stepper is None:
                stepper, passes = prepared(lm, *observations.values()), Passes(lm)
            stepper(observations, actions)
            lengths = observations["attention_mask"].sum(1)
            fresh = np.ones(4, bool) if previous is None else lengths != previous + 1
            shapes = Counter(rows for rows, new in passes.take() if new == 1)
            if not fresh.any():
                assert shapes == {4: 1}
                counted += 1
            previous = lengths
        assert counted > 5

    def test_log_probability_of_a_sampled_action_is_free(self, lm, monkeypatch):
        ids, mask = padded(random_rows((2, 4), (1, 1), VOCAB), 4, 1)
        observations, stepper = {"input_ids": ids, "attention_mask": mask}, lm.stepper()
        log_pi = stepper.next_logprobs(observations)
        passes = Passes(lm)
        monkeypatch.setattr("textenv.lm.logprobs.OutputHead.logits", None)  # would raise
        np.testing.assert_allclose(stepper(observations, np.array([3, 4])), log_pi[[0, 1], [3, 4]], atol=1e-6)
        assert passes.take() == []

    def test_attention_looks_no_further_than_the_longest_row(self, lm, monkeypatch):
        widths, update = [], RowCache.update

        def noted(self, *args):
            keys, values = update(self, *args)
            widths.append(keys.shape[2])
            return keys, values

        ids, mask = padded(random_rows((2, 4), (3, 2), VOCAB), 4, 50)
        stepper = prepared(lm, ids, mask)
        monkeypatch.setattr(RowCache, "update", noted)
        stepper.states(ids, mask)
        assert set(widths) == {6}  # of 54 slots

    def test_memory(self, lm):
        """2 (keys, values) * 4 layers * 2 heads * 8 numbers * 4 bytes = 512 bytes a token."""
        ids, mask = padded(random_rows((2, 4), (1, 1), VOCAB), 4, 1)
        stepper = lm.stepper()
        assert stepper.nbytes == 0
        stepper.states(ids, mask)
        assert stepper.nbytes == 512 * 2 * 5
        memory = [layer.keys.data_ptr() for layer in stepper._cache.layers]
        mask[:, :2] = 0
        stepper.states(ids, mask)
        assert [layer.keys.data_ptr() for layer in stepper._cache.layers] == memory  # allocated once
        stepper.clear()
        assert stepper.nbytes == 0


class TestState:
    def test_copies_carry_no_cache(self, lm):
        ids, mask = padded(random_rows((2, 4), (1, 1), VOCAB), 4, 1)
        observations, actions = {"input_ids": ids, "attention_mask": mask}, np.array([1, 2])
        stepper = lm.stepper()
        expected = stepper(observations, actions)
        assert len(pickle.dumps(stepper)) < len(pickle.dumps(lm)) + 200
        for other in (copy.deepcopy(stepper), pickle.loads(pickle.dumps(stepper))):
            assert other.nbytes == 0
            np.testing.assert_array_equal(other(observations, actions), expected)
        assert stepper.nbytes > 0

    def test_lazy_models_are_loaded_by_the_first_call(self, tiny_model):
        lazy = LazyLanguageModel(tiny_model)
        stepper = lazy.stepper()
        assert isinstance(stepper, Stepper) and lazy._model is None
        assert len(pickle.dumps(stepper)) < 2000
        ids, mask = padded(random_rows((2, 4), (1, 1), 90), 4, 1)
        observations, actions = {"input_ids": ids, "attention_mask": mask}, np.array([1, 2])
        np.testing.assert_allclose(stepper(observations, actions), lazy(observations, actions), atol=3e-5)
        assert lazy._model is not None

    def test_interrupted_passes_are_not_believed(self, lm):
        ids, mask = padded(random_rows((2, 4), (3, 3), VOCAB), 4, 3)
        shown = mask.copy()
        shown[:, -1] = 0
        stepper, actions = lm.stepper(), np.array([1, 2])
        stepper.states(ids, shown)
        block = lm.model.base_model.layers[2]
        handle = block.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stepper.states(ids, mask)
        handle.remove()
        observations = {"input_ids": ids, "attention_mask": mask}
        np.testing.assert_allclose(stepper(observations, actions), lm(observations, actions), atol=3e-5)

    def test_inference_mode_may_be_entered_and_left(self, lm):
        ids, mask = padded(random_rows((2, 4), (3, 3), VOCAB), 4, 3)
        stepper, actions = lm.stepper(), np.array([1, 2])
        for shown, mode in ((1, True), (2, False), (3, True), (3, False)):
            seen = mask.copy()
            seen[:, 4 + shown :] = 0
            observations = {"input_ids": ids, "attention_mask": seen}
            with torch.inference_mode(mode):
                found = stepper(observations, actions)
            np.testing.assert_allclose(found, lm(observations, actions), atol=3e-5)

    def test_torch_is_left_as_it_was_found(self, lm):
        ids, mask = padded(random_rows((2, 4), (3, 3), VOCAB), 4, 3)
        torch.backends.cuda.enable_flash_sdp(True)
        before = torch.get_rng_state(), torch.get_float32_matmul_precision()
        lm.stepper().next_logprobs({"input_ids": ids, "attention_mask": mask})
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.get_float32_matmul_precision() == before[1]
        assert torch.backends.cuda.flash_sdp_enabled()

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_plain_attention_is_for_cpus(self, device):
        with plain_attention(device):
            assert torch.backends.cuda.flash_sdp_enabled() is (device == "cuda")
        assert torch.backends.cuda.flash_sdp_enabled()


def optimiser_step(optimiser, **options):
    def change(lm):
        parameters = list(lm.model.parameters())
        for parameter in parameters:
            parameter.requires_grad_(True)
            parameter.grad = torch.ones_like(parameter)
        optimiser(parameters, lr=0.05, **options).step()

    return change


def loaded(assign):
    def change(lm):
        state = {name: 1.5 * tensor for name, tensor in lm.model.state_dict().items()}
        lm.model.load_state_dict(state, assign=assign)

    return change


def written(write):
    def change(lm):
        for parameter in lm.model.parameters():
            write(parameter)

    return change


def replaced(parameter):
    parameter.data = 1.5 * parameter.data


CHANGES = {
    "fused AdamW": optimiser_step(torch.optim.AdamW, fused=True),
    "foreach AdamW": optimiser_step(torch.optim.AdamW, foreach=True),
    "SGD": optimiser_step(torch.optim.SGD),
    "fused SGD": optimiser_step(torch.optim.SGD, fused=True),
    "load_state_dict": loaded(assign=False),
    "load_state_dict, assigned": loaded(assign=True),
    "in place": written(lambda parameter: parameter.detach().mul_(1.5)),
    "through data": written(lambda parameter: parameter.data.mul_(1.5)),
    "data replaced": written(replaced),
    "through numpy": written(
        lambda parameter: np.multiply(parameter.detach().numpy(), 1.5, parameter.detach().numpy())
    ),
}


class TestWeights:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_changed_weights_empty_the_cache(self, lm, change, monkeypatch):
        ids, mask = padded(random_rows((2, 4), (3, 3), VOCAB), 4, 3)
        shown = mask.copy()
        shown[:, -1] = 0
        steppers, actions = [lm.stepper(), lm.stepper()], np.array([1, 2])
        for stepper in steppers:
            stepper.states(ids, shown)
        change(lm)
        observations = {"input_ids": ids, "attention_mask": mask}
        expected = lm(observations, actions)
        np.testing.assert_allclose(steppers[0](observations, actions), expected, atol=1e-4)
        monkeypatch.setattr(Fingerprint, "changed", lambda self: False)
        stale = steppers[1](observations, actions)
        assert abs(stale - expected).max() > 1e-2  # the contrast: new weights over an old past

    def test_unchanged_weights_do_not(self, lm):
        fingerprint = Fingerprint(lm.model)
        ids, mask = padded(random_rows((2, 4), (3, 3), VOCAB), 4, 3)
        for parameter in lm.model.parameters():
            parameter.requires_grad_(True)
        lm.hidden_states(*map(torch.as_tensor, (ids, mask))).sum().backward()
        lm.model.zero_grad()
        assert not fingerprint.changed()

    def test_of_models_made_in_inference_mode(self):
        """Their tensors keep no count of operations."""
        with torch.inference_mode():
            module = torch.nn.Linear(2, 2)
            fingerprint = Fingerprint(module)
            assert not fingerprint.changed()
            module.weight.mul_(2)
            assert fingerprint.changed()

    def test_of_mixed_and_empty_parameters(self):
        module = torch.nn.ParameterList([torch.ones(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(0)])
        module.register_parameter("absent", None)
        fingerprint = Fingerprint(module)
        assert not fingerprint.changed()
        module[1].data[1, 1] = 2
        assert fingerprint.changed()


class TestAdapters:
    def test_with_and_without_them(self):
        module = tiny("llama")
        add_lora(module, 4, 8, 0)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(0))
        on, off = language_model(module), AdapterFree(module, source="test")
        steppers = on.stepper(), off.stepper()
        for observations, actions in walk(TextGenerationVectorEnv(4, task()), 14):
            found = [stepper(observations, actions) for stepper in steppers]
            np.testing.assert_allclose(found[0], on(observations, actions), atol=1e-4)
            np.testing.assert_allclose(found[1], off(observations, actions), atol=1e-4)
            assert abs(found[0] - found[1]).max() > 0.01
        np.testing.assert_allclose(off(observations, actions), language_model(tiny("llama"))(observations, actions))

    def test_those_that_were_off_stay_off(self):
        module = tiny("llama")
        add_lora(module, 4, 8, 0)
        module.disable_adapters()
        ids, mask = padded(random_rows((2, 4), (1, 1), VOCAB), 4, 1)
        AdapterFree(module, source="test").stepper().states(ids, mask)
        assert module.base_model.layers[0].mlp.up_proj.disable_adapters


class TestOtherModels:
    def read_whole(self, lm, match):
        ids, mask = padded(random_rows((2, 4), (3, 1), VOCAB), 4, 3)
        observations, actions, stepper = {"input_ids": ids, "attention_mask": mask}, np.array([1, 2]), lm.stepper()
        with pytest.warns(UserWarning, match=f"read whole at every step.*{match}"):
            found = stepper(observations, actions)
        np.testing.assert_allclose(found, lm(observations, actions), atol=1e-4)
        assert stepper.nbytes == 0
        passes = Passes(lm)
        stepper(observations, actions)  # neither a pass nor another warning
        assert passes.take() == []

    def test_recurrent_models_are_read_whole(self):
        self.read_whole(language_model(mamba()), "recurrent state")

    def test_unknown_layers_are_read_whole(self, lm):
        lm.model.config.layer_types = ["full_attention", "chunked_attention"] * 2
        assert "chunked_attention" in why_not_cached(lm)
        self.read_whole(lm, "chunked")

    def test_attention_with_masks_of_its_own_is_read_whole(self, lm, monkeypatch):
        monkeypatch.setattr("textenv.lm.cache.ATTENTION", ("flash_attention_2",))
        self.read_whole(lm, "'sdpa'.*mask of ours")

    def test_models_that_fail_the_trial_are_read_whole(self, lm, monkeypatch):
        monkeypatch.setattr(LanguageModel, "extend", lambda *_: (_ for _ in ()).throw(TypeError("no such argument")))
        self.read_whole(lm, "TypeError: no such argument")

    def test_models_that_lose_the_trial_are_read_whole(self, lm, monkeypatch):
        """Positions that the model takes from elsewhere, say."""
        monkeypatch.setattr("textenv.lm.cache.RowCache.place_at", self.misplace)
        assert "missed its full pass" in why_not_cached(lm)

    @staticmethod
    def misplace(cache, place):
        for layer in cache.layers:
            layer.place, layer.index = place, place.index.flip(0)


class TestPureParts:
    def test_masks_by_hand(self):
        """Tokens at 1 and 3 of one row, at 0 of another (repeated); a window of two slots."""
        place = Place(None, torch.tensor([[1, 3], [0, 0]]), 4)
        config = tiny("gemma2").config
        config.sliding_window = 2
        masks = attention_masks(config, place)
        assert masks["full_attention"].int().tolist() == [[[[1, 1, 0, 0], [1, 1, 1, 1]]], [[[1, 0, 0, 0]] * 2]]
        assert masks["sliding_attention"].int().tolist() == [[[[1, 1, 0, 0], [0, 0, 1, 1]]], [[[1, 0, 0, 0]] * 2]]

    def test_one_kind_of_layer_one_mask(self):
        place = Place(None, torch.tensor([[2]]), 3)
        assert attention_masks(tiny("llama").config, place).tolist() == [[[[True] * 3]]]
        eager = attention_masks(tiny("llama", attention="eager").config, Place(None, torch.tensor([[0]]), 2))
        assert eager.tolist() == [[[[0.0, torch.finfo(torch.float32).min]]]]

    @pytest.mark.parametrize(
        ("name", "kinds"),
        [
            ("mistral-sliding", {"sliding_attention"}),
            ("mistral", {"full_attention"}),
            ("gemma3", {"sliding_attention", "full_attention"}),
            ("gpt2", {"full_attention"}),
        ],
    )
    def test_kinds_of_layers(self, name, kinds):
        found = layer_types(tiny(name).config)
        assert set(found) == kinds and len(found) == 4

    def test_new_tokens_by_hand(self):
        held = np.array([[1, 2, 3, EMPTY]] * 6)
        tokens = np.array(
            [
                [1, 2, 3, EMPTY],  # as it is
                [1, 2, 3, 4],  # one more
                [1, 9, 3, EMPTY],  # another second token
                [1, 2, EMPTY, EMPTY],  # cut back: the last one's hidden state is gone
                [7, EMPTY, EMPTY, EMPTY],  # a new prompt
                [1, 2, 9, 4],
            ]
        )
        lengths = (tokens != EMPTY).sum(1)
        assert _new_tokens(held, tokens, lengths).tolist() == [0, 1, 2, 1, 1, 2]

    def test_blocks_by_hand(self):
        """Steps first; then rows of like need, as many as 8 tokens allow at the longest row's 4."""
        blocks = _blocks(np.array([1, 4, 0, 2, 1, 3]), 8)
        assert [block.tolist() for block in blocks] == [[0, 4], [3, 5], [1]]

    def test_a_repeated_token_is_written_once(self):
        cache = RowCache(1, 2, 3)
        cache.place_at(Place(torch.tensor([1]), torch.tensor([[0, 1, 1]]), 2))
        states = torch.tensor([1.0, 2.0, 2.0]).reshape(1, 1, 3, 1)
        keys, values = cache.update(states, -states, 0)
        assert keys.flatten().tolist() == [1, 2] and values.flatten().tolist() == [-1, -2]
        assert cache.layers[0].keys.flatten().tolist() == [0, 0, 0, 1, 2, 0]
        assert (cache.get_max_length(), cache.get_seq_length(), cache.get_mask_sizes(2, 0)) == (3, 0, (2, 0))
