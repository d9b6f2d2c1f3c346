import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynafed.data import PARTITIONS, Partition, carve, make_partition, partition_from_lists
from dynafed.errors import UserError
from dynafed.seeds import Seeds

BUILTIN = ("iid", "dirichlet", "dirichlet-balanced", "shards", "quantity")
checked = settings(deadline=None, derandomize=True, max_examples=60)


def key(seed=0):
    return Seeds(seed).rng("partition")


def balanced_labels(samples, classes):
    return np.arange(samples) % classes


def covers_all_once(partition, samples):
    return np.array_equal(np.sort(partition.indices), np.arange(samples))


@checked
@given(
    kind=st.sampled_from([kind for kind in BUILTIN if kind != "shards"]),
    class_sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    clients=st.integers(1, 40),
    alpha=st.sampled_from([1e-320, 1e-12, 1e-3, 0.01, 0.1, 1.0, 1e3, 1e12]),
    min_samples=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_every_sample_goes_to_one_client_and_each_client_gets_min_samples(
    kind, class_sizes, clients, alpha, min_samples, seed
):
    labels = np.repeat(np.arange(len(class_sizes)) * 3, class_sizes)
    make = lambda: make_partition(kind, labels, clients, alpha=alpha, min_samples=min_samples, rng=key(seed))  # noqa: E731
    if len(labels) < clients * min_samples:
        with pytest.raises(UserError, match="too few"):
            make()
        return
    partition = make()
    assert len(partition) == clients
    assert covers_all_once(partition, len(labels))
    assert partition.sizes.min() >= min_samples
    if kind in ("iid", "dirichlet-balanced"):
        assert partition.sizes.max() - partition.sizes.min() <= 1
    again = make()
    assert np.array_equal(partition.indices, again.indices)
    assert np.array_equal(partition.offsets, again.offsets)


@checked
@given(classes=st.integers(1, 12), clients=st.integers(1, 40), each=st.integers(1, 12), per_class=st.integers(40, 90))
def test_shards_give_each_client_its_classes_and_use_them_evenly(classes, clients, each, per_class):
    labels = balanced_labels(classes * per_class, classes)
    if each > classes or clients * each < classes:
        with pytest.raises(UserError, match="classes_per_client"):
            make_partition("shards", labels, clients, classes_per_client=each, rng=key())
        return
    partition = make_partition("shards", labels, clients, classes_per_client=each, rng=key())
    counts = partition.class_counts(labels, classes)
    assert covers_all_once(partition, len(labels))
    assert ((counts > 0).sum(axis=1) == each).all()
    users = (counts > 0).sum(axis=0)
    assert users.max() - users.min() <= 1
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


def test_shards_refuse_what_they_cannot_do():
    with pytest.raises(UserError, match="can't be shared"):
        make_partition("shards", [0, 0, 1, 1], 4, classes_per_client=2, rng=key())
    with pytest.raises(UserError, match="fewer than min_samples = 5"):
        make_partition("shards", [0] * 4 + [1] * 40, 2, classes_per_client=1, min_samples=5, rng=key())


def test_balanced_dirichlet_keeps_the_skew_of_the_released_code():
    labels = balanced_labels(50_000, 10)
    partition = make_partition("dirichlet-balanced", labels, 80, alpha=0.01, rng=key())
    counts = partition.class_counts(labels, 10)
    assert set(partition.sizes) == {625}
    assert np.median((counts > 0).sum(axis=1)) <= 2
    assert np.mean(counts.max(axis=1) / 625) > 0.85


@pytest.mark.parametrize("classes", [10, 100])
def test_balanced_dirichlet_is_quick_and_finite_in_the_hard_cases(classes):
    labels = balanced_labels(50_000, classes)
    start = time.process_time()
    partition = make_partition("dirichlet-balanced", labels, 1000, alpha=0.001, rng=key())
    assert time.process_time() - start < 10
    assert set(partition.sizes) == {50}
    assert np.median((partition.class_counts(labels, classes) > 0).sum(axis=1)) <= 2


def test_large_alpha_tends_to_iid():
    labels = balanced_labels(10_000, 10)
    for kind in ("dirichlet", "dirichlet-balanced"):
        counts = make_partition(kind, labels, 10, alpha=1e6, rng=key()).class_counts(labels, 10)
        assert np.abs(counts - 100).max() <= 2


def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution():
    alpha, clients = 0.5, 4
    labels = np.repeat(np.arange(2000), 100)
    partition = make_partition("dirichlet", labels, clients, alpha=alpha, min_samples=0, rng=key())
    shares = partition.class_counts(labels, 2000) / 100
    assert np.allclose(shares.mean(axis=1), 0.25, atol=0.02)
    assert np.allclose(shares.var(axis=1), 0.25 * 0.75 / (alpha * clients + 1), atol=0.01)


def test_min_samples_is_taken_from_the_largest_clients():
    labels = balanced_labels(5000, 10)
    unbounded = make_partition("dirichlet", labels, 50, alpha=0.01, min_samples=0, rng=key())
    bounded = make_partition("dirichlet", labels, 50, alpha=0.01, min_samples=20, rng=key())
    assert unbounded.sizes.min() < 20 == bounded.sizes.min()
    assert bounded.sizes.max() < unbounded.sizes.max()
    middle = (unbounded.sizes >= 20) & (unbounded.sizes < bounded.sizes.max() - 1)
    assert np.array_equal(unbounded.sizes[middle], bounded.sizes[middle])


def test_quantity_skews_sizes_but_not_labels():
    labels = balanced_labels(20_000, 4)
    partition = make_partition("quantity", labels, 10, alpha=0.5, rng=key())
    large = partition.sizes > 1000
    shares = partition.class_counts(labels, 4)[large] / partition.sizes[large, None]
    assert np.ptp(partition.sizes) > 1000
    assert np.abs(shares - 0.25).max() < 0.06


def test_another_seed_is_another_partition_and_classes_are_shuffled():
    labels = balanced_labels(1000, 10)
    one, two = (make_partition("iid", labels, 10, rng=key(seed)) for seed in (1, 2))
    assert not np.array_equal(one.indices, two.indices)
    assert not np.array_equal(one[0], np.arange(100))


def test_a_hundred_thousand_clients_are_cheap():
    labels = balanced_labels(200_000, 10)
    start = time.process_time()
    for kind in BUILTIN:
        partition = make_partition(kind, labels, 100_000, alpha=0.1, rng=key())
        assert partition.sizes.min() >= 1
    assert partition.class_counts(torch.from_numpy(labels), 10).shape == (100_000, 10)
    lists = [partition[client] for client in range(100_000)]
    given = partition_from_lists(lists, 200_000)
    assert np.array_equal(given.indices, partition.indices)
    assert np.array_equal(given.offsets, partition.offsets)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "dirichlet-balance"}, "did you mean 'dirichlet-balanced'"),
        ({"clients": 0}, "clients = 0"),
        ({"min_samples": -1}, "min_samples = -1"),
        ({"alpha": 0.0}, "alpha = 0.0"),
        ({"alpha": float("nan")}, "alpha = nan"),
        ({"labels": [0.5]}, "whole numbers, not float64"),
        ({"labels": []}, "whole numbers"),
    ],
)
def test_impossible_requests_are_refused(change, words):
    request = {"kind": "iid", "labels": [0, 1], "clients": 1} | change
    with pytest.raises(UserError, match=words):
        make_partition(**request, rng=key())


def test_another_function_gets_every_setting_and_its_lists_are_checked(monkeypatch):
    def thirds(labels, clients, *, alpha, classes_per_client, min_samples, rng):
        assert (labels.dtype, alpha, classes_per_client, min_samples) == (np.int64, 0.5, 3, 1)
        return np.array_split(rng.permutation(len(labels)), clients)

    made = {
        "thirds": thirds,
        "same": lambda labels, clients, **_: Partition(np.array([2, 0, 0]), np.array([0, 1, 2, 3])),
        "few": lambda labels, clients, **_: [[0]],
        "empty": lambda labels, clients, **_: [[0], [1], []],
        "far": lambda labels, clients, **_: [[0], [1], [9]],
        "text": lambda labels, clients, **_: [["a"], [1], [2]],
        "nothing": lambda labels, clients, **_: None,
        "number": 3,
    }
    assert PARTITIONS.names()[:5] == list(BUILTIN)
    for name, function in made.items():
        monkeypatch.setitem(PARTITIONS._added, name, function)

    def make(kind, **changes):
        settings = {"alpha": 0.5, "classes_per_client": 3, "rng": key()} | changes
        return make_partition(kind, [0, 1, 0, 1, 0, 1, 0], 3, **settings)

    expected = np.array_split(key().permutation(7), 3)
    assert [part.tolist() for part in make("thirds")] == [part.tolist() for part in expected]
    assert [part.tolist() for part in make("same")] == [[2], [0], [0]]
    assert make("empty", min_samples=0).sizes.tolist() == [1, 1, 0]
    for kind, words in {
        "few": "partition = 'few' returned 1 clients instead of 3",
        "empty": "leaves a client 0 samples, fewer than min_samples = 1",
        "far": "client 2 asks for sample 9",
        "text": "client 0's samples must be",
        "nothing": "list of index arrays, one per client, not NoneType",
        "number": "partition = 'number' is int: it must be a function",
        "nowhere:f": "partition = 'nowhere:f' can't be imported",
    }.items():
        with pytest.raises(UserError, match=words):
            make(kind)


def test_a_partition_is_a_sequence_of_views():
    partition = Partition(np.array([3, 1, 2]), np.array([0, 2, 2, 3]))
    assert [part.tolist() for part in partition] == [[3, 1], [], [2]]
    assert partition.sizes.tolist() == [2, 0, 1]
    assert partition[0].base is partition.indices
    assert partition.class_counts([0, 1, 1, 0], 2).tolist() == [[1, 1], [0, 0], [0, 1]]
    with pytest.raises(IndexError):
        partition[-1]


def test_own_lists_may_overlap_and_may_be_of_any_kind():
    partition = partition_from_lists([[0, 1], np.array([1, 2], np.uint8), torch.tensor([4]), range(3)], 5)
    assert [part.tolist() for part in partition] == [[0, 1], [1, 2], [4], [0, 1, 2]]
    assert partition_from_lists([[], [0]], 1, allow_empty=True).sizes.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([], "no clients"),
        ([[0], []], "client 1 has no samples"),
        ([[0], [5]], "client 1 asks for sample 5, but they go from 0 to 4"),
        ([[0, -1]], "client 0 asks for sample -1"),
        ([[0.5]], "client 0's samples must be"),
        ([[True]], "mask has 1 values for 5 samples"),
        ([[[0]]], "shape"),
    ],
)
def test_wrong_lists_are_refused(lists, words):
    with pytest.raises(UserError, match=words):
        partition_from_lists(lists, 5)


@checked
@given(class_sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), share=st.floats(0, 0.999))
def test_carving_is_exact_and_stratified(class_sizes, share):
    labels = np.repeat(np.arange(len(class_sizes)), class_sizes)
    size = int(share * len(labels))
    rest, held = carve(labels, size, key())
    assert len(held) == size
    assert np.array_equal(np.sort(np.concatenate([rest, held])), np.arange(len(labels)))
    assert (np.diff(held) > 0).all()
    assert (np.diff(rest) > 0).all()
    ideal = np.array(class_sizes) * size / len(labels)
    assert (np.abs(np.bincount(labels[held], minlength=len(class_sizes)) - ideal) <= 1).all()


@pytest.mark.parametrize("size", [-1, 4, 5])
def test_carving_too_much_is_refused(size):
    with pytest.raises(UserError, match=f"can't hold back {size} of 4"):
        carve([0, 0, 1, 1], size, key())
