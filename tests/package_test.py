"""Installs the package with pip in a virtual environment that also sees this environment's packages."""

import subprocess
import sys
import sysconfig
import venv

import pytest

from support import ROOT, runs

# Other packages with the names `evaluate` and `inference` are imported before and after.
LOADING = """
import sys, evaluate, simclr_tf2
encoder = simclr_tf2.load(sys.argv[1])
import inference
assert evaluate.OTHER and inference.OTHER and not hasattr(inference, "load")
print(encoder.preprocess(sys.argv[2]).shape)
"""


@pytest.mark.slow
def test_the_package_can_be_installed_used_and_uninstalled(tmp_path):
    environment, others = tmp_path / "environment", tmp_path / "others"
    venv.create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "base.pth").write_text(sysconfig.get_path("purelib"))
    before = set(packages.iterdir())
    others.mkdir()
    for name in ("evaluate", "inference"):
        (others / f"{name}.py").write_text("OTHER = True")
    run_dir, images = tmp_path / "run", ROOT / "docs/figures"
    runs.run(run_dir, train_steps=1)

    def call(*command):
        process = subprocess.run(
            [str(part) for part in command],
            cwd=others,
            env={"PYTHONPATH": str(others)},
            text=True,
            capture_output=True,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    pip = (sys.executable, "-m", "pip", "--python", environment / "bin/python")
    call(*pip, "install", "-q", "--no-deps", "--no-build-isolation", ROOT)
    new = {path.name.partition("-")[0] for path in set(packages.iterdir()) - before}
    assert new == {"simclr_tf2"}
    assert "simclr-tf2 1" in call(environment / "bin/simclr", "--version")
    recipe = "--flagfile=paper/recipes/digits.cfg"
    assert "--model_dir" in call(environment / "bin/simclr", recipe, "--help")
    call(environment / "bin/simclr-embed", run_dir, images, f"--out={tmp_path}/new/v.npz")
    assert (tmp_path / "new/v.npz").exists()
    (image, *_) = images.glob("*.png")
    assert "(8, 8, 3)" in call(environment / "bin/python", "-c", LOADING, run_dir, image)
    call(*pip, "uninstall", "-q", "-y", "simclr-tf2")
    assert set(packages.iterdir()) == before
    assert not list((environment / "bin").glob("simclr*"))
