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
    "OUTSIDE TESTS": 77_000,
    "run.py": 2_100,
    "config.py": 3_300,
    "evaluate.py": 2_350,
    "train.py": 2_400,
    ALGORITHM: 11_670,
    "checkpoints": 6_200,
    "export": 2_830,
    "inference": 5_960,
    "sources": 4_850,
    "runtime": 4_880,
    "transfer": 3_950,
    "probing": 1_990,
    "benchmarks": 5_200,
    "paper": 14_300,
    "tests": 88_500,
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
