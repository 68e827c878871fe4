"""Transfer of an encoder to other data sets: the protocol of the paper's twelve, and of one's own (4.3 and B.8).

    python transfer.py list
    python transfer.py linear --checkpoint=PATH --task=NAME [--dataset=folder:DIR] [--data_dir=DIR] [--out=DIR]
    python transfer.py compare PREDICTIONS.npz PREDICTIONS.npz

`linear` is l2-regularised logistic regression on frozen features. Of what it did, --out keeps features, results and
predictions; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

if __name__ == "__main__":
    import progress

    progress.load_quietly("tensorflow")

import numpy as np
import tensorflow as tf

import checkpoint
import config as config_lib
import evaluate
import export
import features
import metrics
import model as model_lib
import progress
import sources
import weights
from config import UserError

L2_CHOICES = tuple(np.logspace(5, -6, 45))  # the strongest first
DRAWS = 100_000
_HELD_OUT = "80%"  # where the part of the training split begins that is held out, if there is no validation split

# ------------------------------------------------------------------------------------------------------------- tasks


METRICS = {  # name -> function of labels [n] or [n, classes] and scores [n, classes]
    "top_1": lambda labels, scores: float(np.mean(scores.argmax(1) == labels)),
    "mean_per_class": lambda labels, scores: metrics.mean_per_class_accuracy(scores.argmax(1) == labels, labels),
    "mean_average_precision": metrics.mean_average_precision_11,
}


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set, how it is divided, and what it is judged by."""

    title: str
    dataset: str | None  # for --dataset; None: TFDS does not have it, so that it must be in a folder
    metric: str = "top_1"  # of `METRICS`
    train: str = "train"
    validation: str | None = None  # None: the last fifth of `train`
    test: str = "test"

    @property
    def fit(self):
        """The split that is learnt from while settings are chosen."""
        return self.train if self.validation else f"{self.train}[:{_HELD_OUT}]"

    @property
    def choose(self):
        """The split that settings are chosen on."""
        return self.validation or f"{self.train}[{_HELD_OUT}:]"

    @property
    def both(self):
        """What is learnt from once the settings are chosen."""
        return f"{self.train}+{self.validation}" if self.validation else self.train


# The paper's twelve. Food-101 calls its test images validation; of DTD and SUN397 it is the first division; TFDS has
# drawn 30 training images a class of Caltech-101, with a seed of its own.
TASKS = {
    "food101": Task("Food-101", "food101", test="validation"),
    "cifar10": Task("CIFAR-10", "cifar10"),
    "cifar100": Task("CIFAR-100", "cifar100"),
    "birdsnap": Task("Birdsnap", None),
    "sun397": Task("SUN397", "sun397/standard-part1-120k"),
    "cars": Task("Stanford Cars", "cars196"),
    "aircraft": Task("FGVC Aircraft", None, "mean_per_class", validation="validation"),
    "voc2007": Task("PASCAL VOC 2007", "voc/2007", "mean_average_precision", validation="validation"),
    "dtd": Task("DTD", "dtd", validation="validation"),
    "pets": Task("Oxford-IIIT Pets", "oxford_iiit_pet", "mean_per_class"),
    "caltech101": Task("Caltech-101", "caltech101", "mean_per_class"),
    "flowers": Task("Oxford 102 Flowers", "oxford_flowers102", "mean_per_class", validation="validation"),
}


def task_of(arguments):
    """The `Task` that parsed arguments ask for. Raises `UserError`."""
    if arguments.task is None and arguments.dataset is None:
        raise UserError(f"give --task, one of {', '.join(TASKS)}, or --dataset, as for run.py")
    given = {name: getattr(arguments, name) for name in ("dataset", "metric", "train", "validation", "test")}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.task is None:
        return Task(arguments.dataset, **given)
    task = dataclasses.replace(TASKS[arguments.task], **given)
    if task.dataset is None:
        raise UserError(f"--task={arguments.task}: TFDS does not have {task.title}: give --dataset=folder:DIR")
    return task


# ------------------------------------------------------------------------------------------------- linear evaluation


def sweep(fit, choose, metric, l2_choices=L2_CHOICES):
    """Chooses the strength of l2 regularisation.

    Args:
      fit: (features [n, d], labels [n] or [n, classes]) to learn from.
      choose: the same, to choose by.
      metric: name in `METRICS`.
      l2_choices: strengths, the strongest first.

    Returns:
      the best strength, the stronger one of equals; and a dict: strength -> metric.
    """
    path = features.logistic_path(*fit)
    found = {l2: METRICS[metric](choose[1], path.fit(l2).scores(choose[0]))
             for l2 in progress.track(l2_choices, len(l2_choices), "logistic regressions")}
    return max(found, key=found.get), found


def linear(fit, choose, test, metric, l2_choices=L2_CHOICES):
    """Logistic regression on frozen features (paper, B.8.1): chosen on `choose`, fitted to both, tested once.

    Args:
      fit, choose, test: (features [n, d], labels [n] or [n, classes]).
      metric: name in `METRICS`.
      l2_choices: strengths to choose from, the strongest first.

    Returns:
      dict: `test`, the metric; `l2`, the strength; `validation`, strength -> metric; and scores [n, classes] of `test`.
    """
    best, found = sweep(fit, choose, metric, l2_choices)
    path = features.logistic_path(*(np.concatenate(pair) for pair in zip(fit, choose)))
    for l2 in l2_choices[:l2_choices.index(best) + 1]:
        path.fit(l2)
    scores = path.scores(test[0])
    results = dict(test=METRICS[metric](test[1], scores), l2=best, validation={f"{l2:.3g}": value
                                                                               for l2, value in found.items()})
    return results, scores


def _features(arguments, task, out):
    """Features and labels of the three splits; what is in `out` is not computed again."""
    splits = dict(fit=task.fit, choose=task.choose, test=task.test)
    paths = {name: os.path.join(out, f"features_{name}.npz") for name in splits}
    if not all(map(tf.io.gfile.exists, paths.values())):
        known = export.known_of(arguments.checkpoint, arguments.image_size)
        config = known.config.replace(
            precision="float32", eval_center_crop=False, dataset=task.dataset, data_dir=arguments.data_dir,
            follow_links=arguments.follow_links, eval_batch_size=arguments.batch_size)
        source = sources.open_source(config.dataset, config.data_dir, config.follow_links)
        if source.num_classes is None:
            raise UserError(f"--dataset={config.dataset} has no labels: sort its images into one sub-folder a class")
        if source.multi_label != (task.metric == "mean_average_precision"):
            raise UserError(f"--metric={task.metric} does not fit {source.name}: use mean_average_precision where "
                            "examples have several labels, else another")
        for name, split in splits.items():
            sources.check_split(source, name, split)
        model = model_lib.build_model(config, None if known.class_names is None else len(known.class_names))
        checkpoint.load_parts(model, arguments.checkpoint, ("encoder",))
        for name, split in splits.items():
            if not tf.io.gfile.exists(paths[name]):
                vectors, labels = features.extract(
                    tf.distribute.get_strategy(), features.encoder_function(model),
                    evaluate.eval_batches(config, source, split, tf.distribute.get_strategy()), f"features {split}")
                metrics.write_arrays(paths[name], vectors=vectors, labels=labels)
    return {name: _read_arrays(path, "vectors", "labels") for name, path in paths.items()}


def _read_arrays(path, *names):
    """Arrays of a .npz file. Raises `UserError`."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file, np.load(file) as content:
            return [content[name] for name in names]
    except (tf.errors.OpError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read as a file of {' and '.join(names)} "
                        f"({config_lib.first_line(error)}): remove it, or name another") from error


def _main_linear(arguments):
    task = task_of(arguments)
    weights.locate(arguments.checkpoint)
    out = arguments.out or os.path.join("runs", "transfer", "linear_" + config_lib.slug(arguments.task or task.dataset))
    settings = dict(dataclasses.asdict(task), checkpoint=arguments.checkpoint, image_size=arguments.image_size)
    begun = metrics.read_json(os.path.join(out, "settings.json"))
    if begun not in (None, settings):
        raise UserError(f"--out={out} holds another transfer: name another, or remove it")
    tf.io.gfile.makedirs(out)
    metrics.write_json(os.path.join(out, "settings.json"), settings)
    parts = _features(arguments, task, out)
    results, scores = linear(parts["fit"], parts["choose"], parts["test"], task.metric)
    metrics.write_arrays(os.path.join(out, "predictions.npz"), labels=parts["test"][1], logits=scores)
    metrics.write_json(os.path.join(out, "result.json"), dict(results, task=task.title, metric=task.metric))
    progress.say(progress.table(f"linear transfer of {arguments.checkpoint} to {task.title}", [
        (task.metric.replace("_", " "), f"{results['test']:.4f}"), ("l2", f"{results['l2']:.3g}"),
        ("examples", " + ".join(str(len(parts[name][1])) for name in ("fit", "choose", "test"))),
        ("results", os.path.join(out, "result.json"))]))


# ------------------------------------------------------------------------------------------------------ significance


def permutation_test(right, other_right, labels=None, draws=DRAWS, seed=0):
    """How likely two equally good models would differ as much as these two do (paper, B.8.1).

    Under the null hypothesis, the two predictions of an example may be exchanged, so that the sign of its difference
    is that of a coin. Differences of one size are drawn together, by a binomial.

    Args:
      right: [n] in [0, 1], how far the first model is right; booleans, as a rule.
      other_right: the same of the second.
      labels: [n] integers, to compare the means of the classes' accuracies; None: accuracies.
      draws: samples of the null distribution.
      seed: of the draws.

    Returns:
      dict: `difference` of the accuracies (first minus second), and `p`, the share of draws that differ at least as
      much, in either direction. For accuracies that is the exact McNemar test's, but for the draws.
    """
    classes = np.zeros(len(right), np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    sizes = np.bincount(classes)
    parts = (np.asarray(right, np.float64) - np.asarray(other_right, np.float64)) / (sizes[classes] * len(sizes))
    random, drawn = np.random.default_rng(seed), np.zeros(draws)
    for size, count in zip(*np.unique(np.round(np.abs(parts), 15), return_counts=True)):
        drawn += size * (2 * random.binomial(count, 0.5, draws) - count)
    as_far = np.abs(drawn) >= abs(parts.sum()) - 1e-12  # As sums of fractions round.
    return dict(difference=float(parts.sum()), p=float(as_far.mean()))


def compare(labels, scores, other_scores, metric, draws=DRAWS):
    """`permutation_test` of two models' scores [n, classes] for the same examples.

    Average precisions cannot be exchanged example by example: labels [n, classes] are compared by accuracy.
    """
    if labels.ndim == 2:
        rights = [np.where(labels >= 0, (each > 0) == labels, 0).sum(1) / (labels >= 0).sum(1)
                  for each in (scores, other_scores)]
    else:
        rights = [each.argmax(1) == labels for each in (scores, other_scores)]
    return permutation_test(*rights, labels if metric == "mean_per_class" else None, draws)


def _main_compare(arguments):
    (labels, scores), (other_labels, other_scores) = (
        _read_arrays(path, "labels", "logits") for path in (arguments.first, arguments.second))
    if labels.shape != other_labels.shape or (labels != other_labels).any():
        raise UserError(f"{arguments.first} and {arguments.second} are not of the same examples: evaluate both on the "
                        "same split")
    metric = "mean_average_precision" if labels.ndim == 2 else arguments.metric
    found = compare(labels, scores, other_scores, metric)
    by = "accuracy" if labels.ndim == 2 else metric.replace("_", " ")
    told = "is not significant" if found["p"] > 0.05 else "is significant"
    progress.say(progress.table(f"{len(labels)} examples, {DRAWS} permutations", [
        *((path, f"{METRICS[metric](labels, each):.4f}") for path, each in (
            (arguments.first, scores), (arguments.second, other_scores))), None,
        (f"difference of {by}", f"{found['difference']:+.4f}"), ("p", f"{found['p']:.5f}"),
        ("at 0.05", f"the difference {told}")]))


# ------------------------------------------------------------------------------------------------------ command line


def _main_list(arguments):
    del arguments
    progress.say(progress.table("the paper's twelve data sets", [
        (name, f"{task.dataset or 'folder:DIR':28} {task.metric:24} {task.fit} | {task.choose} | {task.test}")
        for name, task in TASKS.items()]))


def _parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("list", help="the paper's data sets").set_defaults(run=_main_list)
    command = commands.add_parser("linear", help="logistic regression on frozen features")
    command.set_defaults(run=_main_linear)
    command.add_argument("--checkpoint", required=True, help="any SimCLR network, as for run.py")
    command.add_argument("--task", choices=TASKS, help="one of the paper's data sets")
    command.add_argument("--dataset", help="as for run.py (default: the task's)")
    command.add_argument("--data_dir", help="as for run.py")
    command.add_argument("--follow_links", action="store_true", help="as for run.py")
    command.add_argument("--metric", choices=METRICS, help="default: the task's, or top_1")
    for name, text in (("train", "to learn from"), ("validation", "to choose by; unset: the last fifth of train"),
                       ("test", "to test on")):
        command.add_argument(f"--{name}", metavar="SPLIT", help=f"{text} (default: the task's)")
    command.add_argument("--image_size", type=int, help="default: that of the network's training, or 224")
    command.add_argument("--batch_size", type=int, default=256, help="images at once")
    command.add_argument("--out", help="directory of the results (default: runs/transfer/linear_TASK)")
    command = commands.add_parser("compare", help="permutation test of two files of predictions")
    command.set_defaults(run=_main_compare)
    command.add_argument("first"), command.add_argument("second")
    command.add_argument("--metric", choices=("top_1", "mean_per_class"), default="top_1")
    return parser


def main(arguments=None):
    """The command line; `UserError` becomes one line and exit status 2."""
    arguments = _parser().parse_args(arguments)
    progress.run_command("transfer.py", lambda: arguments.run(arguments))


if __name__ == "__main__":
    main()
