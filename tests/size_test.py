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
    "OUTSIDE TESTS": 64_835,
    "run.py": 880,
    "config.py": 2_725,
    "evaluate.py": 2_205,
    "train.py simclr.py": 2_215,
    "checks.py": 1_275,
    ALGORITHM: 10_540,
    "checkpoints": 7_265,
    "export": 2_555,
    "inference": 4_075,
    "sources": 4_815,
    "runtime": 4_625,
    "transfer": 3_215,
    "probing": 1_905,
    "benchmarks": 4_675,
    "paper": 11_915,
    "tests": 76_635,
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
