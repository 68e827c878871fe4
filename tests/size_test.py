import pathlib

import pytest

import size

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Largest number of tokens per area (see size.py).
ALGORITHM = (
    "augmentation data.py data_util.py large_batch lars_optimizer.py metrics.py model.py"
    " objective.py resnet.py"
)
CAPS = {
    "OUTSIDE TESTS": 74_310,
    "run.py": 1_010,
    "config.py": 3_345,
    "evaluate.py": 2_760,
    "train.py simclr.py": 2_650,
    "checks.py": 2_185,
    ALGORITHM: 11_590,
    "checkpoints": 7_280,
    "export": 2_780,
    "inference": 4_110,
    "sources": 8_125,
    "runtime": 5_460,
    "transfer": 3_165,
    "probing": 2_195,
    "benchmarks": 5_135,
    "paper": 12_515,
    "tests": 80_340,
}
TEXT = '''"""Module."""
# comment
def f(a: dict[str, int]) -> int:
    """Docstring."""
    return a["x"] + f"{a['x'] + 1}"
'''


def test_tokens_exclude_docstrings_annotations_and_punctuation():
    # def f a return a "x" + f-string
    assert size.count(TEXT) == (5, 2, 8, 4)


@pytest.fixture(scope="module")
def areas():
    return size.count_areas(ROOT)


@pytest.mark.parametrize("names", CAPS)
def test_areas_do_not_grow(areas, names):
    parts = [names] if names in areas else names.split()
    assert sum(areas[name][2] for name in parts) <= CAPS[names]
