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
    "OUTSIDE TESTS": 73_690,
    "run.py": 895,
    "config.py": 3_530,
    "evaluate.py": 2_940,
    "train.py simclr.py": 2_510,
    "checks.py": 2_470,
    ALGORITHM: 10_840,
    "checkpoints": 7_780,
    "export": 2_615,
    "inference": 3_755,
    "sources": 7_610,
    "runtime": 6_245,
    "transfer": 3_030,
    "probing": 2_175,
    "benchmarks": 5_070,
    "paper": 12_250,
    "tests": 79_010,
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
