"""Micro-batches: who is predicted from whom, what is padding, and that workers change nothing."""

import os
import signal
from pathlib import Path

import pytest
import torch

from backstay.testing.ranks import run_ranks
from backstay.testing.tiny_llm import make_tokenizer, write_chats
from backstay.training.batches import IGNORED, Collate, MicroBatch, Sequences, load_batches
from backstay.training.sampler import NO_SAMPLE
from backstay.training.tokens import Tokenizing, TokenStore, make_store

TOKENIZER = make_tokenizer()
HOW = Tokenizing(seq_len=200, too_long="error", use_template=True)


@pytest.fixture(scope="module")
def token_store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    home = tmp_path_factory.mktemp("tokens")
    file = write_chats(home / "d.jsonl", 12)
    return TokenStore(make_store(file, home, tokenizer=TOKENIZER, tokenizer_hash="", how=HOW))


def batch_of(sequences: Sequences, *indices: int) -> MicroBatch:
    return Collate(pad_id=0)([sequences[index] for index in indices])


@pytest.mark.parametrize("capacity", [None, 200])
def test_each_learnt_token_is_predicted_once_from_its_own_document(
    token_store: TokenStore, capacity: int | None
) -> None:
    sequences = Sequences([token_store], capacity=capacity)
    num_learnt = sum(int(token_store[index][1].sum()) for index in range(len(token_store)))
    batches = [batch_of(sequences, index) for index in range(len(sequences))]
    assert sum(batch.num_targets for batch in batches) == num_learnt
    for batch in batches:
        for place, target in zip(batch.kept.tolist(), batch.targets[0].tolist(), strict=True):
            assert target == batch.ids[0, place + 1]
            assert batch.positions[0, place + 1] == batch.positions[0, place] + 1


def test_the_first_token_of_a_document_is_predicted_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "", "completion": "abc"}\n' * 2)
    how = Tokenizing(seq_len=9, too_long="error", use_template=False)
    made = make_store(
        tmp_path / "d.jsonl", tmp_path, tokenizer=TOKENIZER, tokenizer_hash="", how=how
    )
    batch = batch_of(Sequences([TokenStore(made)], capacity=9), 0)
    assert batch.positions.tolist() == [[0, 1, 2, 3] * 2]
    assert batch.kept.tolist() == [0, 1, 2, 4, 5, 6]
    assert TOKENIZER.decode(batch.targets[0]) == "bc<|end|>" * 2


def test_a_pack_holds_whole_samples_one_after_the_other(token_store: TokenStore) -> None:
    sequences = Sequences([token_store], capacity=200)
    members = sequences.members_of(0)
    assert len(members) > 1
    lengths = [len(token_store[sample][0]) for _, sample in members]
    row = sequences[0]
    assert row.positions.tolist() == [place for length in lengths for place in range(length)]


def test_padding_is_no_loss_and_stands_apart_from_a_pack(token_store: TokenStore) -> None:
    single = Sequences([token_store], capacity=None)
    lengths = token_store.lengths()
    short, long = lengths.index(min(lengths)), lengths.index(max(lengths))
    batch = batch_of(single, short, long)
    assert batch.num_tokens == lengths[short] + lengths[long]
    # One document goes on counting, so that attention needs no mask.
    assert batch.positions[0].tolist() == list(range(max(lengths)))
    assert (batch.targets[0][batch.kept >= lengths[short]] == IGNORED).all()
    packed = Sequences([token_store], capacity=200)
    row = packed[0]
    padded = Collate(pad_id=0, length=210)([row])
    assert padded.positions[0, len(row.ids) :].tolist() == list(range(210 - len(row.ids)))


def test_no_sample_is_a_row_without_loss(token_store: TokenStore) -> None:
    batch = batch_of(Sequences([token_store], capacity=None), NO_SAMPLE)
    assert (batch.num_targets, batch.num_tokens, batch.kept.tolist()) == (0, 0, [0])


def test_several_stores_lie_end_to_end(token_store: TokenStore) -> None:
    sequences = Sequences([token_store, token_store], capacity=None)
    assert len(sequences) == 24
    assert torch.equal(sequences[3].ids, sequences[15].ids)
    assert sequences.members_of(15) == [(1, 3)]


def test_workers_give_the_same_batches_in_the_same_order(token_store: TokenStore) -> None:
    sequences = Sequences([token_store], capacity=None)
    plan = [[5, 1], [0, NO_SAMPLE], [11, 4], [2, 2]]
    alone, helped = (
        list(load_batches(sequences, iter(plan), Collate(0), num_workers=workers))
        for workers in (0, 2)
    )
    assert [batch.sample_ids for batch in alone] == [tuple(each) for each in plan]
    for one, other in zip(alone, helped, strict=True):
        assert one.sample_ids == other.sample_ids
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.targets, other.targets)


def load_under_signals(_: int, __: int, path: Path) -> tuple[list[int], int]:
    os.setpgid(0, 0)
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    sequences = Sequences([TokenStore(path)], capacity=None)
    plan = iter([[number] for number in range(12)])
    batches = load_batches(sequences, plan, Collate(0), num_workers=2)
    taken = [next(batches), next(batches)]  # now both workers are at work
    os.killpg(0, signal.SIGTERM)
    taken += batches
    return [batch.sample_ids[0] for batch in taken], len(received)


def test_workers_outlive_a_signal_to_the_whole_process_group(token_store: TokenStore) -> None:
    """P72: SIGTERM kills the data workers first."""
    found = run_ranks(1, load_under_signals, token_store.path, distributed=False)
    assert found == [([*range(12)], 1)]


def test_a_loader_draws_nothing_from_the_generator_that_dropout_uses(
    token_store: TokenStore,
) -> None:
    before = torch.get_rng_state()
    list(load_batches(Sequences([token_store], capacity=None), iter([[0], [1]]), Collate(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_tokens_of_a_store_are_not_copied(token_store: TokenStore, tmp_path: Path) -> None:
    ids, _ = token_store[0]
    assert not ids.flags.owndata
    assert not ids.flags.writeable
