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
    "OUTSIDE TESTS": 63_800,
    "run.py": 900,
    "config.py": 2_750,
    "evaluate.py": 2_030,
    "train.py simclr.py": 2_110,
    "checks.py": 1_200,
    ALGORITHM: 10_500,
    "checkpoints": 6_810,
    "export": 2_450,
    "inference": 4_200,
    "sources": 4_750,
    "runtime": 4_300,
    "transfer": 3_200,
    "probing": 1_905,
    "benchmarks": 5_200,
    "paper": 12_030,
    "tests": 82_700,
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
