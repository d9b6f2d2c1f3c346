import numpy as np
import pytest
import torch

from dynafed.data import from_arrays
from dynafed.errors import UserError


def test_images_stay_bytes_and_are_normalized_per_channel(images):
    x, y = images(50, 3, 4, 5), np.arange(50) % 3
    x[:, 1] //= 3
    dataset = from_arrays((x, y), (x[:5], y[:5].astype(np.uint8)))
    assert (dataset.name, dataset.shape, dataset.classes) == ("custom", (3, 4, 5), 3)
    assert dataset.train_x.dtype == torch.uint8
    assert dataset.test_y.dtype == torch.int64
    scaled = x / 255
    assert np.allclose(dataset.mean, scaled.mean(axis=(0, 2, 3)))
    assert np.allclose(dataset.std, scaled.std(axis=(0, 2, 3)))
    got = dataset.normalize(dataset.train_x)
    expected = (scaled - scaled.mean(axis=(0, 2, 3), keepdims=True)) / scaled.std(axis=(0, 2, 3), keepdims=True)
    assert got.dtype == torch.float32
    assert np.allclose(got, expected, atol=1e-5)
    assert torch.equal(dataset.normalize(dataset.train_x[0]), got[0])


def test_bytes_that_are_no_images_share_one_scale(images):
    x = images(20, 6)
    dataset = from_arrays((x, np.arange(20)), (x, np.arange(20)))
    assert np.allclose(dataset.mean, (x / 255).mean())
    assert np.allclose(dataset.normalize(dataset.train_x).mean(), 0, atol=1e-5)


def test_constant_images_do_not_divide_by_zero():
    x = np.full((4, 1, 2, 2), 7, np.uint8)
    dataset = from_arrays((x, np.zeros(4, int)), (x, np.zeros(4, int)))
    assert dataset.std == (1.0,)
    assert dataset.normalize(dataset.train_x).abs().max() < 1e-6


def test_floats_pass_as_they_are():
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dataset = from_arrays((x, torch.arange(6)), (x[:2], torch.tensor([8, 0])))
    assert (dataset.mean, dataset.std, dataset.classes) == ((), (), 9)
    assert torch.equal(dataset.normalize(dataset.train_x), x.float())


def test_read_only_and_reversed_arrays_are_copied(recwarn):
    x = np.arange(6.0).reshape(3, 2)
    x.flags.writeable = False
    dataset = from_arrays((x, [0, 1, 2]), (x[::-1], [0, 1, 2]))
    assert dataset.test_x.tolist() == [[4, 5], [2, 3], [0, 1]]
    assert not recwarn.list


GOOD = (np.zeros((2, 3)), np.array([0, 1]))


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((np.zeros((2, 3)), [0]), "one label for each"),
        ((np.zeros((0, 3)), []), "at least one sample"),
        ((np.zeros(2), [0, 1]), "at least one sample"),
        ((np.zeros((2, 3)), [0.0, 1.0]), "whole numbers"),
        ((np.zeros((2, 3)), [True, False]), "whole numbers"),
        ((np.zeros((2, 3)), [0, -1]), "label -1"),
        ((np.full((2, 3), np.nan), [0, 1]), "not a number"),
        ((np.full((2, 3), 1e300), [0, 1]), "infinite"),
        ((np.zeros((2, 3), complex), [0, 1]), "real numbers"),
        ((np.array([["a"], ["b"]]), [0, 1]), "numeric array"),
        ((np.zeros((2, 4)), [0, 1]), "make them alike"),
        ((np.zeros((2, 3), np.uint8), [0, 1]), "make them alike"),
        ((np.zeros((2, 3)), [0, 1], 2), "pair"),
    ],
)
def test_wrong_arrays_are_refused(pair, words):
    with pytest.raises(UserError, match=words):
        from_arrays(GOOD, pair)
