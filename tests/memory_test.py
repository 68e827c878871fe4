import pathlib
import re

import pytest

import checks
from config import Config, parse_settings
from large_batch import memory
from runtime import devices
from support.errors import rejects
from support.runs import make_context

TRAINING = pathlib.Path(__file__).resolve().parents[1] / "docs/training.md"
DEFAULT = Config(
    dataset="digits", mode="train", model_dir="runs/memory"
)  # a ResNet-50 with 512 images of 224 pixels


def measurements():
    """Yields the settings and the peak, in GB, in the rows of the table in docs/training.md."""
    row = r"\| ResNet-(\d+) \| (\d+) \| (\d+) \| (.*?) \| ([\d.]+) GB \| ([\d.]+) GB \|"
    for *numbers, flags, estimate, peak in re.findall(row, TRAINING.read_text()):
        depth, image_size, batch = map(int, numbers)
        settings = dict(resnet_depth=depth, image_size=image_size, train_batch_size=batch)
        settings |= parse_settings(" ".join(re.findall(r"--\w+=\w+\.?\d*", flags)))
        yield settings, float(estimate), float(peak)


def test_estimates_are_within_25_percent_of_measurements():
    rows = list(measurements())
    assert len(rows) == 17
    for settings, estimate, peak in rows:
        needed = memory.estimate(Config(**settings)) / 1e9
        assert needed == pytest.approx(peak, rel=0.25)
        assert needed == pytest.approx(estimate, abs=0.05)


@pytest.mark.parametrize(
    "precision, batch, cores, compiled",  # the last in GiB, as in benchmarks/README.md
    [
        ("float32", 1024, 8, 14.2),
        ("mixed_bfloat16", 1024, 8, 9.1),
        ("mixed_bfloat16", 2048, 8, 13.8),
        ("float32", 1024, 4, 28.0),
        ("mixed_bfloat16", 2048, 4, 28.8),
    ],
)
def test_estimates_for_tpus_are_within_20_percent_of_compiled_programs(
    precision, batch, cores, compiled
):
    config = DEFAULT.replace(use_tpu=True, precision=precision, train_batch_size=batch)
    assert memory.estimate(config, cores) == pytest.approx(compiled * 2**30, rel=0.2)


def test_frozen_blocks_store_no_activations():
    frozen = DEFAULT.replace(train_mode="finetune", fine_tune_after_block=4)
    images = 512 * 3 * 12 * 224**2
    expected = 1.3e9 + images + 16 * 23.5e6  # 23.5 million weights
    assert memory.estimate(frozen) == pytest.approx(expected, rel=0.01)


def test_batches_that_do_not_fit_are_reported(monkeypatch, capsys):
    message = (
        "--train_batch_size=512: training needs about 96.8 GB of memory, but only {} GB are"
        " available. Use a smaller "
    )
    remedy = "--train_batch_size or --image_size, or set --micro_batch_size."
    monkeypatch.setattr(memory, "limits", lambda: (60e9, 50e9))
    with rejects(message.format("60.0") + remedy):
        checks.check(make_context(DEFAULT))
    monkeypatch.setattr(memory, "limits", lambda: (100e9, 50e9))
    checks.check(make_context(DEFAULT))
    assert f"warning: {message.format('50.0')}{remedy}" in capsys.readouterr().out
    # The memory of accelerators is not known exactly.
    monkeypatch.setattr(memory, "limits", lambda: (1e9, 1e9))
    monkeypatch.setattr(devices, "accelerator_memory", lambda use_tpu: 40e9)
    checks.check(make_context(DEFAULT.replace(micro_batch_size=512)))
    assert f"{message.format('40.0')}--micro_batch_size " in capsys.readouterr().out


def test_limit_of_a_container_counts(monkeypatch, tmp_path):
    total, available = memory.limits()
    assert 0 < available <= total
    (tmp_path / "max").write_text("1000000\n")
    (tmp_path / "none").write_text("max\n")
    paths = [str(tmp_path / name) for name in ("max", "none", "missing")]
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", paths)
    assert memory.limits() == (1e6, 1e6)
