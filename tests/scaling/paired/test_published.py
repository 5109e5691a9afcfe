"""scaling/paired/published.py: the published tables come out."""

import numpy as np

from scaling.paired.published import kumar_gap, sun_gap

# nominal counts, 20 tokens per parameter, as in the published tables
SIZES = np.array([125e6, 250e6, 350e6, 1.5e9])
ENDS = SIZES[[0, 3]]


def test_kumar_with_offsets() -> None:
    assert np.round(kumar_gap(SIZES), 4).tolist() == [0.0091, 0.0065, 0.0055, 0.0027]


def test_kumar_without_offsets() -> None:
    gaps = np.round(kumar_gap(SIZES, offsets=False), 4)
    assert gaps.tolist() == [0.0164, 0.0116, 0.0098, 0.0048]


def test_sun_e4m3() -> None:
    gaps = np.round(sun_gap(SIZES, 20 * SIZES), 5)
    assert gaps.tolist() == [0.00011, 0.00013, 0.00014, 0.00022]


def test_sun_e5m2() -> None:
    assert np.round(sun_gap(ENDS, 20 * ENDS, 5, 2), 5).tolist() == [0.00015, 0.00031]


def test_sun_e2m1_in_blocks_of_32() -> None:
    gaps = np.round(sun_gap(ENDS, 20 * ENDS, 2, 1, block=32), 4)
    assert gaps.tolist() == [0.0061, 0.0123]
