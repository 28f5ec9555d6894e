"""`VLLMServerEngine` against real servers on the loopback address: the policy's distribution, whatever happens."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from agent_helpers import CUT, lm_envs
from lm_helpers import NAMED, PROMPTS, byte_tokenizer, llama, padded, save_model

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig
from textenv.agents.rollouts import vllm_server_http
from textenv.agents.rollouts.sync_proof import SyncError
from textenv.agents.rollouts.vllm_server import VLLMServerEngine, spread
from textenv.agents.rollouts.vllm_server_http import Server, ServerError
from textenv.agents.rollouts.vllm_server_nccl import Fleet
from textenv.agents.rollouts.vllm_server_process import serve
from textenv.agents.rollouts.vllm_server_weights import FolderTransfer
from textenv.agents.types import Sampling
from textenv.constraint_kinds import AllowedIds, NoStopBefore
from textenv.constraints import joint
from textenv.mdp import TokenMDP

BUDGET = 12
SAMPLING = Sampling(max_tokens=BUDGET, stop_ids=tuple(range(0, NAMED, 10)), seed=3)
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Attention heads of 32 numbers, the smallest that vLLM's CPU kernels take."""


def new_policy(folder, **options):
    return LanguageModelPolicy.from_pretrained(folder, **({"lora_rank": 4} | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("served") / "tiny", llama(**HEADS))


@pytest.fixture(scope="module")
def urls(folder):
    """Two servers, for all tests of this file."""
    pytest.importorskip("vllm")
    with serve(new_policy(folder), 2, threads=1, kv_cache_gib=0.05) as found:
        yield found


@pytest.fixture
def policy(folder):
    return new_policy(folder)


@pytest.fixture
def connect(urls):
    """Makes engines, and closes them after the test."""
    made = []

    def connected(policy, to=urls, **options):
        made.append(VLLMServerEngine(policy, to, **options))
        return made[-1]

    yield connected
    for engine in made:
        engine.close()


@pytest.fixture
def engine(connect, policy):
    engine = connect(policy)
    engine.sync(policy)
    return engine


def prompts(repeats=4):
    encode = byte_tokenizer()
    return [encode(prompt).input_ids for prompt in PROMPTS] * repeats


def lists(generation):
    return [response.tolist() for response in generation.responses]


def move(policy, size=0.2):
    """What an update does to the adapters."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(size)


def largest_gap(policy, asked, generation, action_masks=None):
    """Between the engine's log-probabilities and the trainer's, nats."""
    ids, mask = padded(list(zip(asked, generation.responses, strict=True)), 40, BUDGET)
    trainer = policy.response_logprobs(ids, mask, BUDGET, action_masks)
    gaps = [abs(own - row[: len(own)]).max() for own, row in zip(generation.logprobs, trainer, strict=True)]
    return max(gaps)


# Distribution


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("lora_rank", [4, None])
def test_logprobs_are_the_trainers_before_and_after_a_sync(connect, folder, temperature, lora_rank):
    policy = new_policy(folder, temperature=temperature, lora_rank=lora_rank)
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    engine = connect(policy)
    engine.sync(policy)
    before = engine.generate(prompts(), sampling)
    assert largest_gap(policy, prompts(), before) < 1e-3
    with torch.no_grad():
        for parameter in policy.lm.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert largest_gap(policy, prompts(), before) > 0.05
    engine.sync(policy)
    after = engine.generate(prompts(), sampling)
    assert largest_gap(policy, prompts(), after) < 1e-3
    assert lists(after) != lists(before)


@pytest.mark.slow
def test_unnamed_ids_are_never_written(connect, tmp_path):
    """Rows beyond the tokenizer that would win every time."""
    module = llama(**HEADS)
    with torch.no_grad():
        module.lm_head.weight[NAMED:] = module.lm_head.weight[:7] * 50
    policy = new_policy(save_model(tmp_path, module))
    engine = connect(policy)
    engine.sync(policy)
    generation = engine.generate(prompts(), SAMPLING)
    assert max(response.max() for response in generation.responses) < NAMED
    assert largest_gap(policy, prompts(), generation) < 1e-3
    assert module(torch.tensor([prompts(1)[0]])).logits[0, -1].argmax() >= NAMED


@pytest.mark.slow
def test_constraints_renormalise(engine, policy):
    mdp = TokenMDP(
        vocab_size=policy.lm.vocab_size, stop_ids=SAMPLING.stop_ids, max_prompt_tokens=40, max_response_tokens=BUDGET
    )
    constraint = joint([NoStopBefore(mdp, 3, NAMED), AllowedIds(mdp, range(0, NAMED, 2), NAMED)])
    generation = engine.generate(prompts(), dataclasses.replace(SAMPLING, constraint=constraint))
    assert all((response % 2 == 0).all() for response in generation.responses)
    assert min(len(response) for response in generation.responses) >= 4
    ids, mask = padded(list(zip(prompts(), generation.responses, strict=True)), 40, BUDGET)
    masks = constraint.response_masks(ids, mask, BUDGET)
    assert largest_gap(policy, prompts(), generation, masks) < 1e-3
    assert largest_gap(policy, prompts(), generation) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 3, BUDGET - 1])
def test_any_stop_id_ends_a_response_and_belongs_to_it(engine, place):
    greedy = dataclasses.replace(SAMPLING, temperature=0.0, stop_ids=())
    whole = engine.generate(prompts(1)[:1], greedy)
    [written] = lists(whole)
    assert len(written) == BUDGET and whole.logprobs is None
    first = written.index(written[place])
    unused = [token for token in range(NAMED) if token not in written][:2]
    stopping = dataclasses.replace(greedy, stop_ids=(unused[0], written[place], unused[1]))
    assert lists(engine.generate(prompts(1)[:1], stopping)) == [written[: first + 1]]


# Seeds and servers


@pytest.mark.slow
def test_seeds_belong_to_rows(engine):
    first = lists(engine.generate(prompts(), SAMPLING))
    assert lists(engine.generate(prompts(), SAMPLING)) == first
    assert lists(engine.generate(prompts()[:3], SAMPLING)) == first[:3]
    assert lists(engine.generate(prompts(), dataclasses.replace(SAMPLING, seed=4))) != first
    same = lists(engine.generate(prompts(1)[:1] * 16, SAMPLING))
    assert len({tuple(response) for response in same}) > 8


@pytest.mark.slow
def test_samples_of_a_prompt_follow_each_other(engine, policy):
    one = lists(engine.generate(prompts(1), SAMPLING))
    three = engine.generate(prompts(1), dataclasses.replace(SAMPLING, samples_per_prompt=3))
    assert lists(three)[::3] == one and len(three.responses) == 12
    assert len({tuple(response) for response in lists(three)}) > 8
    repeated = [prompt for prompt in prompts(1) for _ in range(3)]
    assert largest_gap(policy, repeated, three) < 1e-3


@pytest.mark.slow
def test_which_server_writes_a_row_does_not_show(connect, engine, policy, urls):
    alone = connect(policy, urls[0])
    alone.sync(policy)
    expected = alone.generate(prompts(), SAMPLING)
    engine._synced = None  # the other engine has taken one of its servers over
    engine.sync(policy)
    both = engine.generate(prompts(), SAMPLING)
    assert lists(both) == lists(expected)
    for one, other in zip(both.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_prompts_go_to_the_server_with_the_least_to_do():
    assert spread([5, 9, 4, 1], 2) == [1, 0, 1, 0]  # 9 | 5, then 4 on top of 5, then 1 on top of 9 (both have 9)
    assert spread([3, 3, 3], 1) == [0, 0, 0]
    assert spread([], 2) == []
    costs = np.random.default_rng(0).integers(1, 100, size=200)
    loads = np.bincount(spread(costs.tolist(), 3), weights=costs)
    assert loads.max() - loads.min() <= 100


# Weights


@pytest.mark.slow
def test_weights_are_sent_when_they_have_changed_and_leave_no_folder(connect, policy, tmp_path):
    engine = connect(policy, weights_folder=tmp_path)
    versions = []
    for change in (False, False, True, False):
        if change:
            move(policy)
        engine.sync(policy)
        versions.append(engine._version)
    assert versions[0] == versions[1] != versions[2] == versions[3]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_first_syncs_are_proven_on_every_server(connect, policy, urls, caplog):
    engine = connect(policy)
    with caplog.at_level(logging.INFO, "textenv"):
        for _ in range(4):
            move(policy)
            engine.sync(policy)
    proven = [record.getMessage() for record in caplog.records if "proven" in record.getMessage()]
    assert len(proven) == 6 and all(sum(url in line for line in proven) == 3 for url in urls)


@pytest.mark.slow
def test_weights_that_do_not_arrive_are_an_error(engine, policy, monkeypatch):
    move(policy)
    monkeypatch.setattr(FolderTransfer, "send", lambda *_: None)
    with pytest.raises(SyncError, match=r"http://127.*does not have the trainer's weights"):
        engine.sync(policy)
    monkeypatch.undo()
    engine.sync(policy)
    assert largest_gap(policy, prompts(), engine.generate(prompts(), SAMPLING)) < 1e-3


@pytest.mark.slow
def test_a_server_that_another_run_feeds_is_an_error(connect, engine, policy, folder, urls):
    other = new_policy(folder)
    move(other)
    connect(other, urls[1]).sync(other)
    with pytest.raises(ServerError, match=f"{urls[1]} should write with the weights of the last sync"):
        engine.generate(prompts(), SAMPLING)
    engine.sync(policy)
    assert largest_gap(policy, prompts(), engine.generate(prompts(), SAMPLING)) < 1e-3


def test_nccl_ranks_count_on_from_server_to_server():
    """The rest of that road needs GPUs."""
    posted = {}

    class Recorded(Server):
        def get(self, path, task):
            return {"world_size": 2 if self.url.endswith("1") else 4}

        def post(self, path, body, task, attempts=None):
            posted[self.url] = path, body, attempts

    servers = [Recorded(f"http://127.0.0.1:{port}", 1.0) for port in (1, 2, 3)]
    Fleet(servers).init_weight_transfer_engine({"rank_offset": 1, "world_size": 11})
    offsets = [posted[server.url][1]["init_info"]["rank_offset"] for server in servers]
    assert offsets == [1, 3, 7] and all(attempts == 1 for _, _, attempts in posted.values())
    for server in servers:
        server.close()


# The network


class Proxy:
    """Forwards TCP connections to a server; drops the first `drops` of them, before or after passing the request on.

    `mute`: takes requests and never answers.
    """

    def __init__(self, url, drops=0, after=False, port=0):
        self.target = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        self.drops, self.after, self.mute, self.dropped = drops, after, False, 0
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.open = []
        self.lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.open.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with self.lock:
            drop, self.drops = self.drops > 0, max(0, self.drops - 1)
            self.dropped += drop
        with client:
            if drop and not self.after:
                return
            with socket.create_connection(self.target) as server:
                answers = threading.Thread(target=self._back, args=(server, client, drop), daemon=True)
                answers.start()
                self._pump(client, server)
                answers.join()

    def _back(self, server, client, drop):
        if not drop:
            self._pump(server, client)
        elif not self.mute and server.recv(10):  # part of the answer is there: the work was done
            client.shutdown(socket.SHUT_RDWR)

    def _pump(self, source, target):
        try:
            while data := source.recv(65536):
                if self.mute:
                    continue
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self):
        """As if the server had died."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for client in self.open:
            try:
                client.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


@pytest.mark.slow
def test_more_prompt_tokens_than_a_step_reads(connect, policy, urls):
    """Seeded prompts that were read in parts would crash vLLM's CPU sampler, and with it the server."""
    engine = connect(policy, urls[:1])
    engine.sync(policy)
    asked = [[1 + i % (NAMED - 1) for i in range(70)]] * 61  # 4,270 tokens
    sampling = Sampling(max_tokens=2, stop_ids=(), seed=1)
    generation = engine.generate(asked, sampling)
    assert [len(response) for response in generation.responses] == [2] * 61


@pytest.fixture
def proxy(urls):
    made = []

    def proxied(**options):
        made.append(Proxy(urls[1], **options))
        return made[-1]

    yield proxied
    for each in made:
        try:
            each.close()
        except OSError:
            pass


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(vllm_server_http, "FIRST_PAUSE", 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_dropped_connections_do_not_show(connect, engine, policy, proxy, hasty, after):
    expected = lists(engine.generate(prompts(), SAMPLING))
    between = proxy(drops=2, after=after)
    dropping = connect(policy, between.url)
    dropping.sync(policy)
    between.drops = 3
    for server in dropping.servers:  # new connections, to be dropped
        server.close()
    assert lists(dropping.generate(prompts(), SAMPLING)) == expected
    assert between.dropped == 5


@pytest.mark.slow
def test_a_dead_server_is_named_and_a_new_one_at_its_address_is_used(connect, policy, urls, proxy, hasty):
    between = proxy()
    engine = connect(policy, [urls[0], between.url])
    engine.sync(policy)
    expected = lists(engine.generate(prompts(), SAMPLING))
    between.close()
    start = time.monotonic()
    with pytest.raises(ServerError, match=f"{between.url} was asked to write a response and could not be reached in 5"):
        engine.generate(prompts(), SAMPLING)
    move(policy)
    for _ in range(2):  # the second call does not take the first one's weights for sent
        with pytest.raises(ServerError, match=f"{between.url} was asked to"):
            engine.sync(policy)
    assert time.monotonic() - start < 60
    proxy(port=between.port)
    engine.sync(policy)
    generation = engine.generate(prompts(), SAMPLING)
    assert lists(generation) != expected and largest_gap(policy, prompts(), generation) < 1e-3


@pytest.mark.slow
def test_a_server_that_hangs_is_an_error_after_the_timeout(connect, policy, proxy):
    between = proxy()
    engine = connect(policy, between.url, timeout=20.0)
    engine.sync(policy)
    between.mute = True
    engine.servers[0].timeout = 0.3
    with pytest.raises(ServerError, match=r"write a response and did not answer within 0\.3 s"):
        engine.generate(prompts(), SAMPLING)


# Checks before any work


@pytest.mark.slow
def test_what_cannot_be_written_is_refused_before_anything_is_asked(engine, monkeypatch):
    asked = []
    monkeypatch.setattr(Server, "post", lambda *arguments, **_: asked.append(arguments))
    too_long = [[5] * 3, [5] * (engine.context - BUDGET + 1)]
    with pytest.raises(ValueError, match=rf"context of {engine.context} tokens, got a prompt of 117 tokens in row 1"):
        engine.generate(too_long, SAMPLING)
    with pytest.raises(ValueError, match=f"got {NAMED} in row 0"):
        engine.generate([[NAMED]], SAMPLING)
    with pytest.raises(ValueError, match="the policy's temperature"):
        engine.generate(prompts(), dataclasses.replace(SAMPLING, temperature=0.5))
    assert not asked


@pytest.mark.slow
def test_servers_that_were_started_otherwise_are_refused(folder, urls):
    policy = new_policy(folder, dtype="bfloat16")
    with pytest.raises(ServerError, match=r"dtype 'bfloat16', it has 'float32'(.|\n)*VLLM_SERVER_DEV_MODE=1 .*python"):
        VLLMServerEngine(policy, urls)


@pytest.mark.slow
def test_generating_before_a_sync_is_an_error(connect, policy):
    with pytest.raises(RuntimeError, match="`sync` should come before"):
        connect(policy).generate(prompts(), SAMPLING)


def test_no_server_says_how_to_start_one(policy, hasty):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerError, match=rf"127\.0\.0\.1:{port} (.|\n)*write_server_folder(.|\n)*--tokens-only"):
        VLLMServerEngine(policy, f"http://127.0.0.1:{port}")


def test_bad_arguments_are_refused(policy, tmp_path):
    with pytest.raises(ValueError, match="at least one vLLM server"):
        VLLMServerEngine(policy, [])
    with pytest.raises(ValueError, match="each once"):
        VLLMServerEngine(policy, ["http://127.0.0.1:1", "http://127.0.0.1:1"])
    with pytest.raises(ValueError, match="scheme and port included, got '127"):
        VLLMServerEngine(policy, "127.0.0.1:8000")
    with pytest.raises(TypeError, match="LanguageModelPolicy, got Linear"):
        VLLMServerEngine(torch.nn.Linear(1, 1), "http://127.0.0.1:8000")
    with pytest.raises(ValueError, match="`weights_folder` should be a folder"):
        FolderTransfer("float32", tmp_path / "nowhere")


@pytest.mark.slow
def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(policy):
    pytest.importorskip("vllm")
    with pytest.raises(ServerError, match=r"ended with status 2(.|\n)*unrecognized arguments: --no-such-option"):
        with serve(policy, options=["--no-such-option"]):
            pass


ORPHAN = """
import os, sys, time
from pathlib import Path
from textenv.agents.rollouts.vllm_server_process import start_watched
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
start_watched(command, os.environ, "http://127.0.0.1:1", Path(sys.argv[1]))
time.sleep(600)
"""


@pytest.mark.slow
def test_no_server_outlives_the_run_that_started_it(tmp_path):
    log = tmp_path / "log"
    run = subprocess.Popen([sys.executable, "-c", ORPHAN, str(log)])
    try:
        server = int(waited_for(lambda: log.exists() and log.read_text().strip(), 120))
    finally:
        run.kill()  # no chance to tidy up
        run.wait()
    assert waited_for(lambda: not alive(server), 20)


def waited_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# Training


@pytest.mark.slow
@pytest.mark.filterwarnings(CUT)
def test_ppo_trains_with_it(connect, folder, policy):
    engine = connect(policy)
    agent = PPO(policy, lm_envs(folder), PPOConfig(num_minibatches=1, epochs=2, learning_rate=1e-2), engine=engine)
    stats = list(itertools.islice(agent.iterate(), 2))
    assert [record.episodes for record in stats] == [8, 16]
    assert all(np.isfinite([record.score, record.policy_loss, record.value_loss]).all() for record in stats)
    assert all(proof.proven == 2 for proof in engine.proofs.values())
