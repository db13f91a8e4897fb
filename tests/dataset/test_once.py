"""Windows without replacement: each token a target once in an epoch, each epoch cut elsewhere."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from npydata import AsyncDataLoader, NpyTokensDataset, write_tokens


def targets_of(ds, **where):
    return Counter(ds.fetch(range(len(ds)), **where)[1].ravel().tolist())


@settings(deadline=None, max_examples=60,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    shapes=st.lists(
        st.tuples(st.one_of(st.none(), st.integers(1, 5)), st.integers(9, 900)),
        min_size=1, max_size=3,
    ),
    seq_len=st.integers(1, 8),
    seed=st.integers(0, 3),
)  # fmt: skip
def test_a_token_is_a_target_once_and_all_but_the_ends_of_rows_are(tmp_path, shapes, seq_len, seed):
    paths, passed = [], 0
    for k, (rows, row_len) in enumerate(shapes):
        tokens = np.arange(passed, passed + (rows or 1) * row_len)
        passed += len(tokens)
        write_tokens(tmp_path / f"{k}.npy", [tokens], row_len=rows and row_len)
        paths.append(tmp_path / f"{k}.npy")
    ds = NpyTokensDataset(paths, seq_len, seed=seed, without_replacement=True)
    x, y = ds.fetch(range(len(ds)), epoch=2)
    assert (y == x + 1).all()  # no window crosses a row
    targets = targets_of(ds, epoch=2)
    assert max(targets.values()) == 1
    row_count = sum(rows or 1 for rows, _ in shapes)
    assert passed - len(targets) <= row_count * 2 * seq_len


def test_each_epoch_cuts_the_file_at_another_place(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(10_000)])
    ds = NpyTokensDataset(tmp_path / "a.npy", 16, seed=1, without_replacement=True)
    phases = {int(ds.fetch(range(len(ds)), epoch=e)[0][:, 0].min()) for e in range(80)}
    assert len(phases) > 20
    assert max(phases) < 32
    over_all = sum((targets_of(ds, epoch=e) for e in range(80)), Counter())
    assert set(over_all) == set(range(min(phases) + 1, 10_000))
    assert min(phases) <= 2


def test_the_order_depends_on_seed_and_epoch_only(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(2000)])
    ds = NpyTokensDataset(tmp_path / "a.npy", 8, without_replacement=True)
    whole = ds.fetch(range(len(ds)))[0]
    assert whole.tolist() == pickle.loads(pickle.dumps(ds)).fetch(range(len(ds)))[0].tolist()
    ds.set_epoch(1)
    assert whole.tolist() != ds.fetch(range(len(ds)))[0].tolist()
    assert whole[:, 0].tolist() != sorted(whole[:, 0].tolist())


@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders_give_each_window_once(tmp_path, shuffle):
    write_tokens(tmp_path / "a.npy", [np.arange(3000)])
    ds = NpyTokensDataset(tmp_path / "a.npy", 8, seed=3, without_replacement=True)
    for loader in (AsyncDataLoader(ds, batch_size=7, shuffle=shuffle, seed=3),
                   DataLoader(ds, batch_size=7, shuffle=shuffle)):  # fmt: skip
        found = Counter(token for _, y in loader for token in y.ravel().tolist())
        assert found == targets_of(ds)


def test_states_of_windows_with_and_without_replacement_do_not_fit(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(3000)])
    with_them, without = (NpyTokensDataset(tmp_path / "a.npy", 8, seed=3, without_replacement=once)
                          for once in (False, True))  # fmt: skip
    assert with_them.fingerprint() != without.fingerprint()
    assert type(with_them) is NpyTokensDataset
    assert isinstance(without, NpyTokensDataset)
