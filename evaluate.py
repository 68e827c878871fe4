"""Evaluates a trained model once, or every new checkpoint of a run."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

import data
import metrics
import model as model_lib
import simclr
from checkpoints import checkpoint_files, computed_from, loading, lock, run_directory, weight_files
from checkpoints.run_context import RunContext
from config import Config
from metrics import KNN, LBFGS, LINEAR_TOP_1, MEAN_PRECISION, REGULARIZATION, WEIGHTED_KNN
from probing import confusion, diagnostics, features, logistic_regression, nearest_neighbors
from runtime import console, progress, signals, storage, workers
from runtime.errors import UserError, first_line
from sources import classes
from sources.files import FileSource
from sources.source import Source

_POLL_SECONDS = 5.0
_EMBEDDED_ROWS = 64  # maximum number of images whose views `contrastive` embeds at once
# Accuracies by which `--keep_best` compares weights, and the protocols that compute them.
_PROTOCOL_OF = {LINEAR_TOP_1: "linear_head", MEAN_PRECISION: "linear_head", KNN: "knn"}
_RAW, _RAW_PIXELS = "/raw_pixels", 32  # key suffix and maximum image side length of the baseline
# Number of images of `contrastive` if it is not in --eval_protocol, and of `diagnostics`.
_SAMPLED_IMAGES = 2048


def protocols(config: Config, source: Source) -> list[str]:
    """Returns the protocols to run.

    If the model has no linear head, `contrastive` and, if there are labels, `knn` replace
    `linear_head`. Evaluations of a pretraining run include `contrastive`.
    """
    names = list(dict.fromkeys(config.eval_protocols))
    if "linear_head" in names and not config.has_linear_head:
        names.remove("linear_head")
        names.append("contrastive")
        if not source.multi_label and _splits_have_labels(config, source):
            names.append("knn")
    if config.pretraining and not (config.mode == "eval" and config.checkpoint):
        names.append("contrastive")
    return list(dict.fromkeys(names))


def select_labels(config: Config, source: Source) -> Source:
    """Returns the source for evaluations after training, whose training split is restricted by `--label_fraction`.

    The original source, which pretraining and distillation use, is not restricted. In fine-tuning
    and supervised training, it has already been restricted, and is returned unchanged.

    Raises:
      UserError: the training split has too few labeled examples.
    """
    if config.label_fraction == 1 or config.drops_unlabeled:
        return source
    labeled_source = copy.copy(source)
    if config.trains_on_labels:  # In distillation, the other labels are already hidden.
        labeled_source.drop_unlabeled(config.train_split)
    else:
        labeled_source.restrict(config.train_split, config.label_fraction, config.label_seed)
    return labeled_source


def during_training(context: RunContext) -> RunContext:
    """Returns the context for evaluations during training.

    The protocols are `linear_head`, `knn` and, in pretraining, `contrastive` (see `protocols`).
    Unless the run trains on labels, they use all labels.
    """
    config, source, names = context.config, context.source, []
    labeled = _splits_have_labels(config, source)
    is_distilled = config.train_mode == "distill" and source.has_labels(config.eval_split)
    if config.has_linear_head and (labeled or is_distilled):
        names.append("linear_head")
    if labeled and not source.multi_label:
        names.append("knn")
    if config.pretraining and not names:
        names.append("contrastive")
    if not config.trains_on_labels:
        config = config.replace(label_fraction=1.0, label_seed=0)
    return context.replace(
        config=config.replace(
            eval_protocol=",".join(names),
            eval_baselines=False,
            eval_projections=False,
            save_predictions=False,
        )
    )


def _splits_have_labels(config: Config, source: Source) -> bool:
    return all(source.has_labels(split) for split in (config.train_split, config.eval_split))


def eval_batches(
    config: Config, source: Source, split: str, strategy: tf.distribute.Strategy
) -> tf.distribute.DistributedDataset:
    """Returns the distributed evaluation dataset of a split.

    If `eval_steps` is set, `eval_split` is limited to that many batches. Besides images, labels and
    weights, each batch contains positions, int64 [batch], which `features.collect` uses to put the
    examples in the same order as on a single worker.
    """
    size = data.eval_batch_size(config, source, split, strategy.num_replicas_in_sync)

    def build(context, replicas_here):
        def add_positions(batch_index, batch):
            rows = batch_index * size + tf.range(size, dtype=tf.int64)
            return (*batch, rows * context.num_input_pipelines + context.input_pipeline_id)

        batches = data.build_eval_dataset(config, source, split, size, context, replicas_here)
        if split == config.eval_split and config.eval_steps:
            batches = batches.take(config.eval_steps * replicas_here)
        return batches.enumerate().map(add_positions)

    return data.distribute(strategy, build)


def _head_names(config: Config, source: Source, file: weight_files.WeightFile) -> list[str] | None:
    """Returns the class names recorded for a checkpoint's linear head, or None if they need not be matched.

    If the names differ from those of the data set, logs how they are matched. Raises `UserError` if
    they cannot be matched.
    """
    names = source.class_names
    if "linear_head" not in protocols(config, source) or names is None or names == file.class_names:
        return None
    if file.class_names is None:
        console.log(
            f"warning: no class names are recorded for the linear head of {file.path}; its columns"
            f" are assumed to be in the order of the classes of {source.name}"
        )
        return None
    columns = classes.match_columns(names, file.class_names)
    if columns is None:
        raise UserError(
            f"--dataset={config.dataset}: the linear head of {file.path} was trained on different"
            " classes"
            f" ({classes.differences(names, file.class_names, 'the data set', 'the checkpoint')})."
            " Rename the classes, or evaluate without the linear head (--eval_protocol=lbfgs or"
            " knn)."
        )
    missing = [name for name, column in zip(names, columns) if column < 0]
    ignored = f"; examples of other classes ({', '.join(missing)}) are ignored" if missing else ""
    console.log(
        f"the classes of {source.name} are matched by name with the {len(file.class_names)} classes"
        f" of the linear head{ignored}"
    )
    return file.class_names


def results_dir(config: Config) -> str:
    """Returns the directory that results are written to."""
    return (
        os.path.join(config.model_dir, config.eval_name) if config.eval_name else config.model_dir
    )


class Evaluator(contextlib.ExitStack):
    """Evaluator for one model whose weights may change between calls.

    Tracing functions, building data sets and opening the TensorBoard writer each happen only once,
    so memory does not grow with the number of evaluations. Use the evaluator as a context manager,
    so that the writer is closed.
    """

    def __init__(
        self,
        context: RunContext,
        model: model_lib.Model,
        weights_flag: str | None = None,
        head_names: list[str] | None = None,
    ):
        """Creates the evaluator, without tracing or writing anything.

        Args:
          context: settings, data and strategy. The lock is checked before anything is written.
          model: a built model, whose variables may change between evaluations.
          weights_flag: flag and value that identify the weights in error messages. None:
            `--model_dir`.
          head_names: class names of the linear head. None: the data set's class names.
        """
        super().__init__()
        config, source, strategy = context.config, context.source, context.strategy
        self._context, self._model = context, model
        self._config, self._source, self._strategy = config, source, strategy
        self._protocol_names = protocols(config, source)
        self._is_chief, self._check = context.is_chief, context.check_lock
        self._head_columns = (
            classes.match_columns(source.class_names, head_names) if head_names else None
        )
        self._head_names = head_names or source.class_names
        self._weights = weights_flag or f"--model_dir={config.model_dir}"
        self._batches = {}  # split -> distributed dataset
        # results for the untrained encoder and raw pixels, the same for all checkpoints
        self._baselines: dict[str, float] | None = None
        self._logits = features.compile_function(
            strategy, lambda images: model(images, training=False)["logits_sup"]
        )
        encoders = {"": features.encoder_function(model)}
        if config.eval_projections:
            encoders["/projections"] = features.projection_function(model)
        self._encoders = self._compile(encoders)
        # the batches of view pairs; each batch is divided into parts
        self._parts: tf.data.Dataset | None = None
        self._embed_views = self._compile_views(model)
        self._losses = tf.function(self._contrastive_losses, autograph=False)

    def evaluate_and_write(
        self, step: int, complete: bool = True, weights: str | None = None
    ) -> dict[str, Any]:
        """Runs the configured protocols on the current weights and writes the results.

        Results of other protocols that were computed from the same weights, data and settings are
        kept. After training, protocols whose results are complete are not repeated, except that
        `lbfgs` and `knn` are repeated together. If a protocol fails, the results of earlier
        protocols are written to result_<step>.json, unless this file exists already.

        Args:
          step: training step at which the weights were saved.
          complete: whether all parts of the model were loaded. If not, the weight decay is not
            computed, and `--keep_best` ignores the weights.
          weights: digest of the file that contains the weights. None: the model contains all of its
            weights, so that its digest is the same.

        Returns:
          A dict of results under the original's keys (`eval/label_top_1_accuracy`,
          `eval/label_top_5_accuracy`, `eval/regularization_loss`, `global_step`) and the keys
          defined as constants in `metrics`, and the record `computed_from`.

        Raises:
          UserError: results, logits or features contain NaN or Inf, too few examples have labels,
            or the results cannot be written.
        """
        if self._is_chief:
            self._check()
            run_directory.check_writable(results_dir(self._config))
        # All workers must take part in reading variables.
        weights = weights or loading.weights_digest(self._model)
        record = computed_from.describe(
            self._config, self._source, weights, step, self._context.trained_examples
        )
        config = self._config
        results, recorded = self._read_results(step, record)
        missing = self._missing_protocols(results, recorded)
        names = dict.fromkeys([*recorded, *config.eval_protocols])
        if "contrastive" in missing and "contrastive" not in config.eval_protocols:
            names.pop("contrastive", None)  # It uses only some of the images.
        record["eval_protocol"] = ",".join(names)
        results.update({"global_step": step, computed_from.KEY: record})
        if complete:
            decay = model_lib.add_weight_decay(self._model, config.weight_decay, config.optimizer)
            results[REGULARIZATION] = float(decay)
        try:
            self._run_protocols(step, missing, results)
        except BaseException:
            path = self._path(f"result_{step}.json")
            has_results = results.keys() - {"global_step", computed_from.KEY, REGULARIZATION}
            if self._is_chief and has_results and not storage.is_file(path):
                self._check()
                storage.write_json(path, results)
            raise
        if self._is_chief:
            self._check()
            write_results(results_dir(config), step, results)
            scalars = {key: value for key, value in results.items() if isinstance(value, float)}
            storage.write_scalars(self._writer, step, scalars)
        if config.keep_best:
            own = (None, *self._protocol_names)  # without results of earlier protocols
            own_results = {
                name: value for name, value in results.items() if _PROTOCOL_OF.get(name) in own
            }
            best = _BestWeights(self._context, self._model)
            best.keep(step, own_results if complete else {})
        return results

    def _run_protocols(self, step: int, missing: set[str], results: dict[str, Any]) -> None:
        """Runs the missing protocols, and adds their results to `results`."""
        config, subset = self._config, ""
        if config.label_fraction < 1:
            subset = f", {self._source.num_examples(config.train_split):,} labels"
        for names, description, protocol in (
            ({"linear_head"}, config.head_name, self.linear_head),
            ({"contrastive"}, "contrastive loss", self.contrastive),
            ({"lbfgs", "knn"}, f"frozen encoder{subset}", self.frozen_encoder),
        ):
            if names & missing:
                if self._is_chief:
                    console.log(f"evaluating step {step}: {description}")
                results.update(self._finite(protocol(step), step))

    def _path(self, name: str) -> str:
        """Returns the path of a file or directory with results."""
        return os.path.join(results_dir(self._config), name)

    def _read_results(self, step: int, record: dict) -> tuple[dict[str, Any], list[str]]:
        """Returns earlier results of the same weights, data and settings, and their protocols. Both may be empty."""
        if self._is_chief:
            results = storage.read_json(self._path(f"result_{step}.json")) or {}
            earlier = results.get(computed_from.KEY, {})
            if {**earlier, "eval_protocol": record["eval_protocol"]} == record:
                return results, earlier["eval_protocol"].split(",")
        return {}, []

    def _missing_protocols(self, results: dict[str, Any], recorded: list[str]) -> set[str]:
        """Returns the protocols to run, given the result of `_read_results`.

        Only when training that was stopped during its evaluation resumes, protocols whose results
        are complete are not repeated.
        """
        config, names = self._config, self._protocol_names
        reuses = config.mode == "train_then_eval" and not config.allow_flag_changes
        done = [int(reuses and self._is_complete(name, results, recorded)) for name in names]
        done = workers.gather_integers(done, self._strategy).max(0)  # those of the chief
        return {name for name, is_done in zip(names, done) if not is_done}

    def _is_complete(self, protocol: str, results: dict[str, Any], recorded: list[str]) -> bool:
        config = self._config
        if protocol == "linear_head":
            has_accuracy = LINEAR_TOP_1 in results or MEAN_PRECISION in results
            return has_accuracy and not config.save_predictions
        if protocol == "contrastive":
            is_sampled = "contrastive" not in config.eval_protocols
            return metrics.CONTRAST_LOSS in results and (is_sampled or "contrastive" in recorded)
        suffixes = [*self._encoders]
        if config.eval_baselines:
            suffixes += [metrics.UNTRAINED, _RAW]
        key = {"lbfgs": LBFGS, "knn": KNN}[protocol]
        return all(f"{key}{suffix}" in results for suffix in suffixes)

    def _finite(self, results: dict[str, float], step: int) -> dict[str, float]:
        """Returns the results of a protocol. Raises `UserError` if any of them is NaN or Inf."""
        for key, value in results.items():
            if not np.isfinite(value):
                raise UserError(
                    f"{self._weights}: {key} at step {step} is {value}. {features.DIVERGED}"
                )
        return results

    @functools.cached_property
    def _writer(self) -> tf.summary.SummaryWriter:
        """The writer of TensorBoard events, which the exit stack closes."""
        writer = storage.event_writer(self._path("eval"))
        self.callback(writer.close)
        return writer

    def _extract(self, function: Callable, split: str, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Applies a compiled function to a split, checks for NaN and Inf, and returns vectors and labels."""
        if split not in self._batches:
            self._batches[split] = eval_batches(self._config, self._source, split, self._strategy)
        vectors, labels = features.collect(function, self._batches[split], f"features of {split}")
        features.check_finite(
            vectors, f"{self._weights}: at step {step}, the features or logits of {split}"
        )
        return vectors, labels

    def linear_head(self, step: int) -> dict[str, float]:
        """Returns the metrics of the linear head on all labeled examples; see `linear_results`.

        If examples have one label, also writes the confusion matrix. With `--save_predictions`, writes
        the labels, the logits, the class names and, for image files, the paths.
        """
        config = self._config
        logits, labels = self._extract(self._logits, config.eval_split, step)
        others = {"class_names": np.array(self._head_names)}
        if config.save_predictions and isinstance(self._source, FileSource):
            others["paths"] = self._source.labeled_names(config.eval_split)[: len(labels)]
        if self._head_columns is not None:
            if "paths" in others and labels.ndim == 1:
                others["paths"] = others["paths"][np.array(self._head_columns)[labels] >= 0]
            labels, logits = metrics.map_labels(labels, logits, self._head_columns)
        if not (labels >= 0).any():
            raise UserError(
                f"--eval_split={config.eval_split}: this split of {self._source.name} has no labels"
                " of the network's classes. Use a split with such labels."
            )
        if self._is_chief:
            if config.save_predictions:
                path = self._path(f"predictions_{step}.npz")
                storage.write_arrays(path, labels=labels, logits=logits, **others)
            if labels.ndim == 1:
                confusion.report(results_dir(config), step, labels, logits, self._head_names)
        return metrics.linear_results(labels, logits)

    def contrastive(self, step: int) -> dict[str, float]:
        """Computes the contrastive loss and its metrics on held-out images, in full batches on one replica.

        Unless `contrastive` is in `--eval_protocol`, only the first 2,048 images are used. The
        results include those of the untrained network, and chance level.
        """
        results, h, z = self._compare_views(self._embed_views)
        self._finite(results, step)
        levels = metrics.chance_levels(self._config, int(results[metrics.CONTRAST_BATCH]))
        chance = {
            f"eval/{name}{metrics.CHANCE}": value
            for name, value in levels.items()
            if f"eval/{name}" in results
        }
        return {**results, **self._untrained_contrastive, **chance, **diagnostics.diagnose(h, z)}

    @functools.cached_property
    def _untrained_contrastive(self) -> dict[str, float]:
        """The contrastive loss and accuracy of the untrained network, which are the same for all checkpoints."""
        results, *_ = self._compare_views(self._compile_views(self._untrained_model()))
        return {
            key + metrics.UNTRAINED: results[key]
            for key in (metrics.CONTRAST_LOSS, metrics.CONTRAST_ACCURACY)
            if key in results
        }

    def _compile_views(self, model: keras.Model) -> Callable:
        return tf.function(functools.partial(self._outputs_of_views, model), autograph=False)

    def _compare_views(
        self, embed_views: Callable
    ) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        """Returns the contrastive metrics of a network, and h and z of the first images, [V, n, d] each.

        The images of a batch are embedded in parts, since the activations of thousands of images
        may not fit in memory. The network is in inference mode, so the results do not depend on the
        size of the parts.

        Args:
          embed_views: `_outputs_of_views` for the network.
        """
        config, num_examples = self._config, self._source.num_examples(self._config.eval_split)
        if "contrastive" not in config.eval_protocols:
            num_examples = min(num_examples, _SAMPLED_IMAGES)
        size = min(config.eval_batch_size, num_examples)
        part_sizes = [min(_EMBEDDED_ROWS, size - row) for row in range(0, size, _EMBEDDED_ROWS)]
        if self._parts is None:
            pairs = data.build_view_pairs(
                config, self._source, config.eval_split, config.seed, math.gcd(*part_sizes)
            )
            self._parts = pairs.rebatch(part_sizes)
        parts, mean_metrics = iter(self._parts), metrics.MeanMetrics()
        num_batches = min(num_examples // size, config.eval_steps or num_examples)
        vectors = []
        for batch_index in range(num_batches):
            index = tf.constant(batch_index, tf.int64)
            outputs = []
            for row in range(0, size, _EMBEDDED_ROWS):
                images, labels = next(parts)
                outputs.append((*embed_views(images, index, tf.constant(row)), labels))
            h, z, labels = zip(*outputs)
            h, z = tf.concat(h, 1), tf.concat(z, 1)
            if batch_index * size < _SAMPLED_IMAGES:
                vectors.append((h.numpy(), z.numpy()))
            mean_metrics.add(self._losses(h, z, tf.concat(labels, 0)))
        results = {f"eval/{name}": value for name, value in mean_metrics.means().items()}
        counts = {metrics.CONTRAST_IMAGES: num_batches * size, metrics.CONTRAST_BATCH: size}
        h, z = (np.concatenate(parts, 1)[:, :_SAMPLED_IMAGES] for parts in zip(*vectors))
        return {**results, **counts}, h, z

    def _outputs_of_views(
        self,
        model: keras.Model,
        images: Sequence[tf.Tensor],
        batch_index: tf.Tensor,
        first_row: tf.Tensor,
    ) -> tuple[tf.Tensor, ...]:
        """Returns h and z, each [number of views, rows, channels], for consecutive rows, starting at `first_row`."""
        images = simclr.views(images, self._config, batch_index, first_row=first_row)
        endpoints = model(tf.concat(images, 0), training=False)
        outputs = endpoints["final_avg_pool"], endpoints["proj_head_output"]
        return tuple(tf.reshape(x, [len(images), -1, x.shape[-1]]) for x in outputs)

    def _contrastive_losses(
        self, h: tf.Tensor, z: tf.Tensor, labels: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Returns a dict of the contrastive loss and its metrics for a whole batch (see `_outputs_of_views`)."""
        h, z = (tf.reshape(x, [-1, x.shape[-1]]) for x in (h, z))
        terms, scalars = simclr.over_batch(h, z, labels, self._config)
        return {**terms, **scalars}

    def frozen_encoder(self, step: int) -> dict[str, float]:
        """Returns the results of `lbfgs` and `knn` on the frozen encoder and, if requested, on the baselines."""
        results = self._probe(self._encoders, step)
        if self._config.eval_baselines:
            if self._baselines is None:
                functions = {
                    metrics.UNTRAINED: features.encoder_function(self._untrained_model()),
                    _RAW: features.pixels_function(_RAW_PIXELS),
                }
                self._baselines = self._probe(self._compile(functions), step)
            results.update(self._baselines)
        return results

    def _untrained_model(self) -> keras.Model:
        """Returns the network with the initial weights of a run without `--checkpoint`."""
        # Training initializes weights with this seed.
        keras.utils.set_random_seed(self._config.seed + 1)
        with self._strategy.scope():
            return model_lib.build_model(self._config, self._source.num_classes)

    def _compile(self, functions: dict[str, Callable]) -> dict[str, Callable]:
        return {
            suffix: features.compile_function(self._strategy, function)
            for suffix, function in functions.items()
        }

    def _probe(self, functions: dict[str, Callable], step: int) -> dict[str, float]:
        """Runs `lbfgs` and `knn` on the outputs of `functions`, a dict mapping key suffixes to compiled functions."""
        config, names, results = self._config, self._protocol_names, {}
        for suffix, function in functions.items():
            train_set, test_set = (
                self._extract(function, split, step)
                for split in (config.train_split, config.eval_split)
            )
            _check_labels(train_set, test_set, config)
            results.update(metrics.describe_labels(test_set[1], metrics.PROBE_LABELS))
            if "lbfgs" in names:
                fitted = logistic_regression.lbfgs_accuracy(train_set, test_set)
                results[f"{LBFGS}{suffix}"] = fitted["accuracy"]
                results[f"eval/lbfgs_l2{suffix}"] = fitted["l2_per_example"]
            if "knn" in names:
                knn = nearest_neighbors.knn_accuracy
                results[f"{KNN}{suffix}"] = knn(train_set, test_set)
                results[f"{WEIGHTED_KNN}{suffix}"] = knn(
                    train_set,
                    test_set,
                    nearest_neighbors.WEIGHTED_NEIGHBORS,
                    nearest_neighbors.WEIGHTED_TEMPERATURE,
                )
            # Deletes the temporary files before the next features are computed.
            del train_set, test_set
        return results


class _BestWeights:
    """The weights in model_dir/best, whose accuracy is the highest so far (`--keep_best`)."""

    def __init__(self, context: RunContext, model: model_lib.Model):
        self._context, self._model = context, model
        self._root = results_dir(context.config)
        self._directory = os.path.join(self._root, "best")

    def keep(self, step: int, results: dict[str, Any]) -> None:
        """Saves the weights if their accuracy is higher than that of the weights in the directory."""
        context, directory = self._context, self._directory
        with contextlib.ExitStack() as stack:
            if context.is_chief:
                stack.enter_context(lock.Lock(self._root, name=lock.EXPORT, wait=True))
                if not os.path.islink(directory):
                    checkpoint_files.remove_unfinished(directory)
            else:  # All workers must take part in saving.
                directory = stack.enter_context(tempfile.TemporaryDirectory())
            is_best = context.is_chief and self._is_best(results)
            if not workers.gather_integers([int(is_best)], context.strategy).any():
                return
            context.check_lock()
            storage.makedirs(directory)
            write_results(directory, step, results)
            run_directory.copy_start(context.config.model_dir, directory)
            step_variable = tf.Variable(step, dtype=tf.int64)
            trackable = tf.train.Checkpoint(model=self._model, global_step=step_variable)
            checkpoint_files.save(trackable, directory, step)
            for other in checkpoint_files.list_steps(directory):
                if other != step:
                    checkpoint_files.remove(directory, other)
            checkpoint_files.prune(directory, step, keep=1)

    def _is_best(self, results: dict[str, Any]) -> bool:
        """Returns whether the results are better than those in the directory. If not comparable, logs the reason."""
        metric, directory, reason = _best_metric(results), self._directory, ""
        saved = checkpoint_files.latest_checkpoint(directory)
        if metric is None:
            reason = (
                "the evaluation computed no accuracy, or the checkpoint lacks parts of the model"
            )
        elif os.path.islink(directory):  # Pruning would delete checkpoints at the link's target.
            reason = f"{directory} is a link"
        elif saved:
            # result.json may already describe a newer checkpoint, which has not been saved.
            file = f"{directory}/result_{checkpoint_files.step_from_prefix(saved)}.json"
            best = storage.read_json(file) or {}
            changes = computed_from.differences(best, results, with_labels=metric == KNN)
            if computed_from.KEY not in best:
                reason = (
                    f"{file} does not record what it was computed from. Use another --eval_name"
                )
            elif changes or _best_metric(best) != metric:
                reason = (
                    f"{directory} was chosen by {_best_metric(best)} with other evaluation settings"
                    f" ({', '.join(changes) or 'eval_protocol'}). Use another --eval_name"
                )
            elif results[metric] <= best[metric]:
                return False
        if reason:
            console.log(f"--keep_best: the weights are not kept, because {reason}")
        return not reason


def _best_metric(results: dict[str, Any]) -> str | None:
    """Returns the key of the accuracy by which `--keep_best` compares weights, or None if there is none."""
    return next((name for name in _PROTOCOL_OF if name in results), None)


def _check_labels(
    train_set: tuple[np.ndarray, np.ndarray],
    test_set: tuple[np.ndarray, np.ndarray],
    config: Config,
) -> None:
    """Raises `UserError` if the splits have too few labels for training or testing."""
    num_classes = len(set(train_set[1].tolist()))
    if num_classes < 2 or not len(test_set[1]):
        raise UserError(
            f"--eval_protocol={config.eval_protocol}: there are too few labels (classes in"
            f" --train_split={config.train_split}: {num_classes}; labeled examples in"
            f" --eval_split={config.eval_split}: {len(test_set[1])}). Use a training split with at"
            " least two classes, and an evaluation split with labels."
        )


def evaluate_and_write(context: RunContext, model: model_lib.Model, step: int) -> dict[str, float]:
    """Evaluates a model once; see `Evaluator.evaluate_and_write`."""
    with Evaluator(context, model) as evaluator:
        return evaluator.evaluate_and_write(step)


def wait_for_run(model_dir: str, timeout: float, only_if_locked: bool) -> None:
    """Waits until a run has started in `model_dir`, so that its settings can be read. Logs that it waits.

    Args:
      model_dir: directory of the run.
      timeout: number of seconds to wait. 0: no timeout.
      only_if_locked: whether to wait only while a process holds the lock for training in the
        directory.

    Raises:
      UserError: the directory does not exist, and no timeout is set.
    """
    if not (timeout or only_if_locked or tf.io.gfile.exists(model_dir)):
        parent, name = os.path.split(model_dir.rstrip("/"))
        names = tf.io.gfile.listdir(parent or ".") if tf.io.gfile.exists(parent or ".") else []
        problem = f"--model_dir={model_dir}: the directory does not exist."
        for similar in difflib.get_close_matches(name, names, 1):
            problem += f" Did you mean {os.path.join(parent, similar)}?"
        raise UserError(
            f"{problem} Correct the path, or set --eval_timeout to wait for a training run."
        )
    seconds_waited, is_logged = progress.stopwatch(), False
    while not run_directory.read_flags(model_dir) and not checkpoint_files.list_steps(model_dir):
        if only_if_locked and not lock.is_held(model_dir):
            return
        signals.safe_point()
        if not is_logged:
            console.log(f"waiting for a training run to start in {model_dir}")
            is_logged = True
        if timeout and seconds_waited() > timeout:
            return
        _sleep(timeout)


def _sleep(timeout: float) -> None:
    """Waits for the time between two checks for new files. 0: no timeout."""
    time.sleep(min(_POLL_SECONDS, timeout / 10) if timeout else _POLL_SECONDS)


def new_checkpoints(
    model_dir: str, last_step: int, timeout: float, all_steps: bool
) -> Iterator[str]:
    """Yields the prefixes of the checkpoints in `model_dir`, newest first, and then of each new one, up to `last_step`.

    Args:
      model_dir: directory to watch for checkpoints.
      last_step: the iterator stops after this step's checkpoint.
      timeout: the iterator stops after this many seconds without a new checkpoint. 0: no timeout.
      all_steps: whether to yield the existing checkpoints oldest first.
    """
    seen, seconds_waited = set(), progress.stopwatch()
    console.log(f"waiting for checkpoints in {model_dir}, up to step {last_step}")
    while True:
        signals.safe_point()
        new_steps = [step for step in checkpoint_files.list_steps(model_dir) if step not in seen]
        if not seen and not all_steps:
            new_steps.reverse()
        for step in new_steps:
            seen.add(step)
            yield checkpoint_files.checkpoint_prefix(model_dir, step)
            seconds_waited = progress.stopwatch()
        if any(step >= last_step for step in seen):
            return
        if timeout and seconds_waited() > timeout:
            console.log(
                f"stopped: no new checkpoint in {model_dir} for {timeout:.0f} s (--eval_timeout)"
            )
            return
        if not new_steps:
            _sleep(timeout)


def _required_parts(config: Config, source: Source) -> tuple[str, ...]:
    """Returns the model parts that the protocols use, named as in `loading.PARTS`."""
    names, parts = protocols(config, source), ["encoder"]
    uses_head = "linear_head" in names
    on_projections = uses_head and config.linear_head_on_projections
    if "contrastive" in names or config.eval_projections or on_projections:
        parts.append("projection head")
    if uses_head:
        parts.append("linear head")
    return tuple(parts)


class _FileEvaluator(contextlib.ExitStack):
    """Evaluator for weights in files. The model is built for the first file."""

    def __init__(self, context: RunContext, flag: str):
        """`flag` is the flag whose value is a file or contains it, for error messages."""
        super().__init__()
        # Reports too few labels before the first checkpoint is written.
        source = select_labels(context.config, context.source)
        self._context, self._flag = context.replace(source=source), flag
        self._model: model_lib.Model | None = None

    def load(self, path: str) -> loading.LoadResult:
        """Loads the weights at `path`."""
        config, source = self._context.config, self._context.source
        is_first = self._model is None
        if is_first:
            self._model, names = _build_model(self._context, path, self._flag)
            evaluator = Evaluator(self._context, self._model, f"{self._flag}={path}", names)
            self._evaluator = self.enter_context(evaluator)
        parts = _required_parts(config, source)
        loaded = loading.load_parts(self._model, path, parts, self._flag)
        if is_first and self._context.is_chief:
            console.log_lines(loaded.lines)
        return loaded

    def evaluate(self, step: int, loaded: loading.LoadResult) -> dict[str, Any]:
        """Evaluates the loaded weights, and returns the results."""
        return self._evaluator.evaluate_and_write(step, not loaded.not_loaded, loaded.file.digest())

    def log(self, title: str, results: dict[str, Any]) -> None:
        """Logs a table of the results."""
        if self._context.is_chief:
            file = os.path.join(results_dir(self._context.config), "result.json")
            log_results(self._context, title, results, {"results": file})


def evaluate_weights(context: RunContext) -> None:
    """Evaluates the weights of `--checkpoint`."""
    config = context.config
    with _FileEvaluator(context, "--checkpoint") as evaluator:
        loaded = evaluator.load(config.checkpoint)
        results = evaluator.evaluate(loaded.file.step or 0, loaded)
        evaluator.log(f"{config.network_name} on {context.source.name}", results)


def evaluate_checkpoints(
    context: RunContext, last_step: int, export: Callable[[str, dict[str, float]], object]
) -> None:
    """Evaluates checkpoints of the run in `model_dir`.

    Starts with the newest checkpoint that can be read or, with `--keep_best` or `--eval_epochs`, with
    all existing ones.

    Args:
      context: settings, data and strategy.
      last_step: last training step of the run.
      export: called after each evaluation with the prefix of the checkpoint and the results, unless
        the checkpoint lacks parts of the model.
    """
    config, newest, skipped = context.config, -1, None
    all_steps = config.keep_best or config.eval_epochs > 0
    with _FileEvaluator(context, "--model_dir") as evaluator:
        for path in new_checkpoints(config.model_dir, last_step, config.eval_timeout, all_steps):
            step = checkpoint_files.step_from_prefix(path)
            if step < newest and not all_steps:
                continue
            try:
                loaded = evaluator.load(path)
                newest = max(newest, step)
                results = evaluator.evaluate(step, loaded)
                if context.is_chief and not loaded.not_loaded:
                    export(path, results)
            except (tf.errors.OpError, UserError) as error:
                if _is_usable(path, error):
                    raise
                skipped = error
                continue
            evaluator.log(path, results)
    if skipped and newest < 0:
        raise skipped


def _build_model(
    context: RunContext, path: str, flag: str
) -> tuple[model_lib.Model, list[str] | None]:
    """Builds a model for the weights at `path`. Returns the model and, if they differ, the head's class names."""
    config, source = context.config, context.source
    head_names = _head_names(config, source, weight_files.open_weights(path, flag))
    with context.strategy.scope():
        model = model_lib.build_model(config, len(head_names) if head_names else source.num_classes)
        if not config.pretraining:
            # Freeze the same layers as in training, since the weight decay depends on them.
            model.freeze(config.fine_tune_after_block)
    return model, head_names


def _is_usable(path: str, error: Exception) -> bool:
    """Returns whether a checkpoint still exists and is not corrupt after an error. If not, logs why it is skipped."""
    if not tf.io.gfile.exists(f"{path}.index"):
        console.log(
            f"skipped {path}: the checkpoint was removed before it could be read"
            " (--keep_checkpoint_max)"
        )
        return False
    is_corrupt = isinstance(error, weight_files.UnreadableWeights) and checkpoint_files.is_readable(
        path
    )
    if is_corrupt:
        console.log(f"warning: skipped {path}: the checkpoint is corrupt ({first_line(error)})")
    return not is_corrupt


def log_results(
    context: RunContext, title: str, results: dict[str, Any], others: Mapping[str, object]
) -> None:
    """Logs a table of the results and of other values, and a warning if training did not improve the results."""
    head, has_trained_images = context.config.head_name, context.trained_examples > 0
    rows = metrics.result_rows(results, head, has_trained_images)
    rule = [None] if rows else []
    console.log(console.format_table(title, [*rows, *rule, *others.items()]))
    reasons = [] if has_trained_images else metrics.reasons_for_no_progress(results, head)
    if reasons:
        console.log(
            f"warning: some results are not better than without training: {'; '.join(reasons)}. Use"
            " more images, more steps or a larger batch, or start from pretrained weights."
        )


def write_results(directory: str, step: int, results: dict[str, float]) -> None:
    """Writes result_<step>.json, which this program reads, and its numbers to result.json (latest results)."""
    numbers = {name: value for name, value in results.items() if name != computed_from.KEY}
    storage.write_json(os.path.join(directory, "result.json"), numbers, has_checksum=False)
    storage.write_json(os.path.join(directory, f"result_{step}.json"), results)
