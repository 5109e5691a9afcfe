"""Rounding to FP8 against torch's casts; what nvfp4 has besides: rotation and stochastic
rounding."""

import numpy as np
import pytest
import torch

from fp8.linears import set_position
from fp8.noise import NOISE_BLOCK, noise_at
from fp8.recipes import E2M1, E4M3, E5M2, RECIPES, Operand
from fp8.rounding import fake_quantise, rotated, scale_for
from tests.helpers.fp8_models import build


def hard_values(format: torch.dtype) -> torch.Tensor:
    """All of BF16, all midpoints of the format's values, random bits, all sizes; fp32."""
    torch.manual_seed(0)
    all_bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    grid = torch.arange(256, dtype=torch.uint8).view(format).float()
    midpoints = ((grid[:, None] + grid) / 2).flatten()
    random_bits = torch.randint(-(2**31), 2**31, (10**6,)).int().view(torch.float32)
    all_sizes = torch.randn(10**6) * torch.logspace(-9, 6, 10**6)
    return torch.cat((all_bf16, midpoints, random_bits, all_sizes))


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
def test_rounding_is_torchs_cast(format: torch.dtype):
    """The same as a cast to float8 and back, bit for bit."""
    values, largest = hard_values(format), torch.finfo(format).max
    expected = values.clamp(-largest, largest).to(format).float()
    computed = fake_quantise(values, Operand(format, "constant"))
    is_nan = expected.isnan()
    assert torch.equal(computed.isnan(), is_nan)
    assert torch.equal(computed[~is_nan], expected[~is_nan])


@pytest.mark.parametrize(
    "amax, is_power_of_2, scale",
    [
        (448.0, False, 1.0),
        (7.0, False, 64.0),
        (5.0, False, 448 / 5),
        (448.0, True, 1.0),
        (5.0, True, 64.0),  # rounded down: nothing saturates
        (449.0, True, 0.5),
    ],
)
def test_a_scale_makes_the_largest_magnitude_the_formats_or_less(
    amax: float, is_power_of_2: bool, scale: float
):
    computed = scale_for(torch.tensor(amax), 448.0, is_power_of_2)
    assert computed.item() == pytest.approx(scale, rel=1e-7)


# ------------------------------------------------------------------------------------ the rotation


def test_the_rotation_is_orthogonal_and_so_keeps_products():
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    mix = rotated(torch.eye(64)).double()
    assert torch.allclose(mix @ mix.t(), torch.eye(64).double(), atol=1e-6)
    assert torch.allclose(rotated(x).double(), mix @ x.double(), rtol=1e-5, atol=1e-4)


def test_the_rotation_spreads_outliers():
    """One token of 1,000 becomes 16 of 250."""
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    x[20] = 1000.0
    assert rotated(x).abs().max() < 260


def test_the_rotation_makes_no_constant_one_value():
    """By random signs."""
    assert rotated(torch.ones(64, 1)).abs().max() < 3


# ----------------------------------------------------------------- the noise of stochastic rounding


@pytest.fixture(scope="module")
def noise() -> torch.Tensor:
    """That of a layer's first 4,096 tokens, (tokens, channels)."""
    return noise_at((4096, 64), torch.tensor(0), 5)


def test_noise_is_uniform_from_0_to_1(noise: torch.Tensor):
    assert noise.min() >= 0 and noise.max() < 1
    assert noise.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert noise.std().item() == pytest.approx(12**-0.5, abs=2e-3)


def test_the_noise_of_neighbours_is_independent(noise: torch.Tensor):
    correlation = np.corrcoef(noise[1:].flatten(), noise[:-1].flatten())[0, 1]
    assert abs(correlation) < 0.01


def test_a_token_keeps_its_noise_in_any_batch(noise: torch.Tensor):
    assert torch.equal(noise[100:200], noise_at((100, 64), torch.tensor(100), 5))


def splitmix64(number: int) -> int:
    """The generator's `number`-th output from state 0 (Steele et al. 2014), by Python's
    integers."""
    return finalised(number * 0x9E3779B97F4A7C15 % 2**64)


def finalised(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_noise_is_the_upper_24_bits_of_splitmix64() -> None:
    """Also behind the first block of numbers."""
    n_columns = 48
    noise = noise_at((2000, n_columns), torch.tensor(10**12), 0)
    for row, column in ((0, 0), (0, 47), (681, 47), (682, 0), (683, 5), (1999, 47)):
        number = (10**12 + row) * n_columns + column
        assert noise[row, column].item() == (splitmix64(number) >> 40) / 2**24


@pytest.mark.parametrize("position", [-5, 2**63 - 2, -(2**63)])
@pytest.mark.parametrize("salt", [-3, 2**60 + 2**56 - 1, 2**63 - 1])
def test_noise_wraps_at_64_bits(position: int, salt: int) -> None:
    """Of rows wider than a block of numbers too."""
    n_columns = NOISE_BLOCK + 3
    noise = noise_at((3, n_columns), torch.tensor(position), torch.tensor(salt))
    for row, column in ((0, 0), (1, 7), (2, n_columns - 1)):
        number = (position + row) * n_columns + column
        z = (number * 0x9E3779B97F4A7C15 + salt) % 2**64
        assert noise[row, column].item() == (finalised(z) >> 40) / 2**24


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_of_nothing_there_is_no_noise(shape: tuple[int, int]) -> None:
    assert noise_at(torch.Size(shape), torch.tensor(0), 5).shape == shape


def test_each_salt_has_its_own_noise(noise: torch.Tensor):
    assert not torch.equal(noise[:100], noise_at((100, 64), torch.tensor(0), 6))


def test_each_layer_of_each_seed_has_a_salt_of_its_own():
    salts = set()
    for seed in range(2):
        model, _ = build("nvfp4")
        set_position(model, 0, seed)
        salts |= {m.salt.item() for m in model.modules() if hasattr(m, "salt")}
    assert len(salts) == 2 * 8


def test_what_the_format_holds_stays_whatever_the_noise():
    exact = torch.tensor([[6.0, 3, 1, 0.5, -6, -3, 0, 2] * 2])
    largest_noise = torch.full((1, 16), 1 - 2**-24)
    rounded = fake_quantise(exact, RECIPES["nvfp4"].grad, noise=largest_noise)
    assert rounded.tolist() == exact.tolist()


def test_stochastic_rounding_goes_up_where_the_noise_is_below_the_share_of_the_way() -> None:
    """Multiples of 1/64 and noise in multiples of 1/32: many shares equal their noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-384, 385, (512, 16), generator=generator) / 64
    x[:, 0], x[:, 1], x[::2, 2] = 6.0, -0.0, 0.0  # 6: the scale is 1
    noise = torch.randint(0, 32, x.shape, generator=generator) / 32
    rounded = fake_quantise(x, Operand(E2M1, "constant", is_stochastic=True), noise=noise)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = np.unique([-magnitudes, magnitudes])
    above = np.searchsorted(grid, x.numpy(), side="right").clip(max=len(grid) - 1)
    lower, upper = grid[above - 1], grid[above]
    is_up = noise.numpy() < (x.numpy() - lower) / (upper - lower)
    expected = np.where(is_up, upper, lower)
    np.testing.assert_array_equal(rounded.numpy(), expected)


def test_stochastic_rounding_makes_no_negative_zero() -> None:
    x = torch.tensor([[-0.0, 0.0, -0.1, -0.4] * 4])
    for noise in (0.0, 0.5):
        operand = Operand(E2M1, "constant", is_stochastic=True)
        rounded = fake_quantise(x, operand, noise=torch.full(x.shape, noise))
        assert not rounded[rounded == 0].signbit().any()
