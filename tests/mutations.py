"""Mutation check (`make mutations`): introduces one error at a time, and reports which test detects it.

    python tests/mutations.py [WORD...]

Each mutation replaces text in a temporary copy of the source tree. The mutation's tests then run in
this copy until one fails. With WORDs, only the mutations whose names contain one of them are
checked. The exit status is 1 if a mutation is not detected, if its original text does not occur
exactly once, or if one of the tests also fails without mutations.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    """An error to introduce into the file `path`. `tests` is the test file, or the test, that must detect it."""

    name: str
    path: str
    original: str
    replacement: str
    tests: str


_REPLICAS = (
    "tests/replicas_test.py::test_two_replicas_match_one_replica"
    "_and_local_batch_norm_matches_a_naive_implementation"
)
_VIEWS = "tests/data_test.py::test_training_views_match_a_loop_over_examples_and_views"
_LOSS, _LARS, _MODEL = (
    "tests/objective_test.py",
    "tests/lars_optimizer_test.py",
    "tests/model_test.py",
)
_OPERATORS, _STEPS = (
    "tests/data_util_test.py",
    f"{_MODEL}::test_three_training_steps_match_the_original",
)
_BLUR = f"{_OPERATORS}::test_batch_random_blur_samples_sigma_uniformly_for_half_of_the_images"
_EXCLUDED = f"{_MODEL}::test_lars_excludes_vectors_and_the_linear_head_from_weight_decay"

MUTATIONS = (
    # Views
    Mutation(
        "color distortion is missing from the policy",
        "data_util.py",
        "policy.then(*color_distortion(strength, brightness, switch)) if strength > 0 else policy",
        "policy",
        f"{_OPERATORS}::test_view_statistics_match_the_original",
    ),
    Mutation(
        "--color_jitter_strength is ignored",
        "augmentation/policies.py",
        "strength=config.color_jitter_strength",
        "strength=0.0",
        _VIEWS,
    ),
    Mutation(
        "both views have the same crop",
        "data.py",
        "view_seed(seed, view), policy.area_range",
        "view_seed(seed, 0), policy.area_range",
        _VIEWS,
    ),
    Mutation(
        "both views are identical",
        "data_util.py",
        "rng.nth_seed(seed, view, rng.VIEW)",
        "rng.nth_seed(seed, 0, rng.VIEW)",
        _VIEWS,
    ),
    Mutation(
        "images are never flipped",
        "data_util.py",
        'Operator("flip", flip_horizontally, 0.5)',
        'Operator("flip", flip_horizontally, 0.0)',
        f"{_OPERATORS}::test_half_of_the_images_are_flipped",
    ),
    Mutation(
        "--random_flip is ignored",
        "augmentation/policies.py",
        "flip=config.random_flip",
        "flip=False",
        _VIEWS,
    ),
    Mutation(
        "the blur has a fixed sigma",
        "data_util.py",
        "return low + (high - low) * draws",
        "return high + 0 * draws",
        _BLUR,
    ),
    Mutation(
        "the range of the blur's sigma is doubled",
        "data_util.py",
        "BLUR_SIGMA, BLUR_PROBABILITY = (0.1, 2.0), 0.5",
        "BLUR_SIGMA, BLUR_PROBABILITY = (0.2, 4.0), 0.5",
        _BLUR,
    ),
    Mutation(
        "both views have the same blur",
        "simclr.py",
        "rng.nth_seed(step_seed, index, rng.VIEW)",
        "step_seed",
        f"{_MODEL}::test_views_steps_and_seeds_have_independent_blur",
    ),
    Mutation(
        "the blur of a micro-batch is that of the first one",
        "train.py",
        "first_row += replicas.row_offset(self.rows, self.strategy)",
        "first_row = replicas.row_offset(self.rows, self.strategy)",
        "tests/train_test.py::test_micro_batch_gradients_and_statistics_match_those_of_a_single_tape",
    ),
    Mutation(
        "preprocess_image uses random crops in evaluation",
        "data_util.py",
        "return preprocess_for_eval(image, height, test_crop, resize)",
        "return apply_policy(image, Policy(), tf.zeros([2], tf.int64), height)",
        f"{_OPERATORS}::test_evaluation_crop_matches_the_original",
    ),
    Mutation(
        "the evaluation pipeline uses random crops",
        "data.py",
        "test_crop=config.center_crop_eval",
        "is_training=True, seed=tf.zeros([2], tf.int64)",
        "tests/data_test.py::test_evaluation_images_are_resized_center_crops",
    ),
    # Loss
    Mutation(
        "the temperature of the loss is multiplied by 10",
        "objective.py",
        "labels = tf.one_hot(positives, 2 * total, dtype=z_a.dtype)",
        "labels, temperature = tf.one_hot(positives, 2 * total, dtype=z_a.dtype), 10 * temperature",
        _LOSS,
    ),
    Mutation(
        "--temperature is multiplied by 10",
        "simclr.py",
        "settings = config.hidden_norm, config.temperature, strategy",
        "settings = config.hidden_norm, 10 * config.temperature, strategy",
        _STEPS,
    ),
    Mutation(
        "each view is its own negative",
        "objective.py",
        "on_value=_masked_logit(z_a.dtype), off_value=0.0",
        "on_value=0.0, off_value=0.0",
        _LOSS,
    ),
    Mutation(
        "projections are not normalized",
        "objective.py",
        "tf.math.l2_normalize(z, -1) if hidden_norm else z",
        "z",
        _LOSS,
    ),
    Mutation(
        "gathered projections have no gradient",
        "objective.py",
        "    positives = tf.range(n)",
        "    all_z_a, all_z_b = tf.stop_gradient(all_z_a), tf.stop_gradient(all_z_b)\n    positives"
        " = tf.range(n)",
        _LOSS,
    ),
    Mutation(
        "--nohidden_norm is ignored",
        "simclr.py",
        "settings = config.hidden_norm, config.temperature, strategy",
        "settings = True, config.temperature, strategy",
        "tests/alternative_losses_test.py::test_losses_match_loop_implementation",
    ),
    # Model and optimizer
    Mutation(
        "--momentum is ignored",
        "model.py",
        "            config.momentum,\n",
        "            0.9,\n",
        f"{_MODEL}::test_flags_set_momentum_and_batch_norm_decay",
    ),
    Mutation(
        "all seeds have the same initial weights",
        "train.py",
        "keras.utils.set_random_seed(config.seed + 1)",
        "keras.utils.set_random_seed(1)",
        "tests/run_test.py::test_the_seed_determines_the_initial_weights_and_the_order_of_the_examples",
    ),
    Mutation(
        "the linear head trains the encoder",
        "model.py",
        "tf.stop_gradient(head_input) if self._stops_head_gradient else head_input",
        "head_input",
        f"{_MODEL}::test_gradients_of_the_linear_head_do_not_reach_the_encoder",
    ),
    Mutation(
        "batch norm is computed per replica",
        "runtime/batch_norm.py",
        "is_shared = self.across_replicas and context and context.num_replicas_in_sync > 1",
        "is_shared = False",
        _REPLICAS,
    ),
    Mutation(
        "--global_bn is ignored in the encoder",
        "model.py",
        "global_bn=config.global_bn,",
        "global_bn=False,",
        _REPLICAS,
    ),
    Mutation(
        "LARS applies weight decay and layer adaptation to batch norm and biases",
        "model.py",
        "lambda var: var.shape.rank <= 1 or var.ref() in head",
        "lambda var: var.ref() in head",
        _EXCLUDED,
    ),
    Mutation(
        "LARS applies weight decay and layer adaptation to the linear head",
        "model.py",
        "lambda var: var.shape.rank <= 1 or var.ref() in head",
        "lambda var: var.shape.rank <= 1",
        _EXCLUDED,
    ),
    Mutation(
        "--linear_head_learning_rate is ignored",
        "model.py",
        "gradient * ratio if variable.ref() in head else gradient",
        "gradient",
        "tests/train_test.py::test_micro_batch_gradients_and_statistics_match_those_of_a_single_tape",
    ),
    Mutation(
        "micro-batches differentiate only their own projections",
        "large_batch/micro_batches.py",
        "loss += tf.reduce_sum(tf.gather(gradient, index) * output)",
        "loss += 0 * tf.reduce_sum(tf.gather(gradient, index) * output)",
        "tests/train_test.py::test_micro_batch_gradients_and_statistics_match_those_of_a_single_tape",
    ),
    Mutation(
        "a NaN loss is reported as finite",
        "train.py",
        "is_finite = all_finite([*terms.values(), *gradients])",
        "is_finite = tf.constant(True)",
        "tests/train_test.py::test_steps_with_nan_weights_are_reported_as_non_finite",
    ),
    Mutation(
        "LARS applies layer adaptation to the variables without weight decay",
        "lars_optimizer.py",
        "adaptation = self.exclude_from_weight_decay",
        "adaptation = []",
        _LARS,
    ),
    Mutation(
        "the linear head has no weight decay",
        "model.py",
        "decayed = [v for v in model.trainable_variables if v.ref() in head and v.shape.rank > 1]",
        "decayed = []",
        f"{_MODEL}::test_loss_includes_the_weight_decay_that_the_optimizer_does_not_apply",
    ),
    Mutation(
        "the trust ratio is always 1",
        "lars_optimizer.py",
        "eeta * tf.math.divide_no_nan(param_norm, update_norm)",
        "tf.ones_like(param_norm)",
        _LARS,
    ),
    Mutation(
        "the trust ratio is applied after the momentum",
        "lars_optimizer.py",
        "        classic_momentum: bool = True,\n        eeta",
        "        classic_momentum: bool = False,\n        eeta",
        _STEPS,
    ),
    # Learning rate
    Mutation(
        "there is no warm-up",
        "model.py",
        "tf.where(step < warmup_steps, step / max(warmup_steps, 1) * peak, cosine)",
        "cosine",
        f"{_MODEL}::test_schedule_matches_the_original",
    ),
    Mutation(
        "square-root scaling is linear",
        "model.py",
        "else math.sqrt(batch_size)",
        "else batch_size / 256",
        f"{_MODEL}::test_schedule_matches_the_original",
    ),
    Mutation(
        "--train_steps does not change the schedule",
        "model.py",
        "train_steps=config.train_steps,\n",
        "\n",
        f"{_MODEL}::test_flags_set_the_end_and_the_scaling_of_the_schedule",
    ),
    Mutation(
        "--learning_rate_scaling is ignored",
        "model.py",
        "learning_rate_scaling=config.learning_rate_scaling,",
        'learning_rate_scaling="linear",',
        f"{_MODEL}::test_flags_set_the_end_and_the_scaling_of_the_schedule",
    ),
)


def first_failure(tree: pathlib.Path, tests: list[str]) -> str | None:
    """Runs tests in the copy `tree`. Returns the first failed test, or None if all tests pass or no test can run."""
    # Without bytecode files, Python cannot mistake a mutated module for the original one.
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-rfE",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            *tests,
        ],
        cwd=tree,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    found = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", process.stdout, re.MULTILINE)
    if process.returncode not in (0, 1) or (process.returncode == 1) != bool(found):
        print(process.stdout[-2000:] + process.stderr[-2000:])
    return found[1] if found and process.returncode == 1 else None


def main():
    """Checks the mutations. Exits with status 1 if one is not detected."""
    chosen = [
        mutation
        for mutation in MUTATIONS
        if any(word in mutation.name for word in sys.argv[1:] or [""])
    ]
    detecting, num_errors = set(), 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = pathlib.Path(scratch, "tree")
        shutil.copytree(
            ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "shared")
        )
        for mutation in chosen:
            path, begin = tree / mutation.path, time.monotonic()
            text = path.read_text(encoding="utf-8")
            if text.count(mutation.original) != 1:
                print(
                    f"{mutation.name}: the original text does not occur exactly once in"
                    f" {mutation.path}"
                )
                num_errors += 1
                continue
            path.write_text(text.replace(mutation.original, mutation.replacement), encoding="utf-8")
            test = first_failure(tree, [mutation.tests])
            path.write_text(text, encoding="utf-8")
            num_errors += test is None
            detecting |= {test} - {None}
            result = f"caught by {test}" if test else "NOT CAUGHT"
            print(f"{mutation.name}: {result} ({time.monotonic() - begin:.0f} s)", flush=True)
        if detecting and (test := first_failure(tree, sorted(detecting))):
            num_errors += 1
            print(f"{test} also fails without mutations")
    print(f"{len(chosen)} mutations, {num_errors} errors")
    sys.exit(bool(num_errors))


if __name__ == "__main__":
    main()
